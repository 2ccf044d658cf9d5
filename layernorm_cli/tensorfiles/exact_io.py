"""Reads and writes of exactly so many bytes; the system may do a part of them at a time."""

from __future__ import annotations

import contextlib
import errno
import os

from ..errors import FormatError, InputError

__all__ = [
    "copy_to_spool",
    "open_spool",
    "read_at",
    "read_next",
    "reason",
    "reserve",
    "truncated",
    "write_at",
    "write_next",
]

CHUNK = 1 << 22


def reason(error: OSError) -> str:
    """Return what the system says went wrong, without number and path."""
    return (error.strerror or str(error)).lower()


def truncated(where: str, end: int, expected: int) -> FormatError:
    """Return the error that says where a file ends, and how many bytes were expected."""
    return FormatError(
        where,
        f"truncated: the file ends at byte {end}",
        f"at least {expected} bytes",
        "fetching the file again; it may still be being written",
    )


def read_at(fd: int, view: memoryview, offset: int, where: str) -> None:
    """Fill view from the file's bytes at offset; Raises FormatError where the file ends before."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise InputError(where, reason(error)) from None
        if count == 0:
            raise truncated(where, offset + done, offset + len(view))
        done += count


def read_next(fd: int, view: memoryview) -> int:
    """Fill view from a pipe; return how many bytes came before its end."""
    done = 0
    while done < len(view):
        count = os.readv(fd, [view[done:]])
        if count == 0:
            break
        done += count
    return done


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of data into the file at offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def write_next(fd: int, data: memoryview) -> None:
    """Write all of data to a pipe."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def reserve(fd: int, size: int) -> None:
    """Reserve size bytes for a new file, so that a full disk is found before the work; best effort."""
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def open_spool(files: contextlib.ExitStack) -> int:
    """Open a file without a name, gone when files are closed, for data that must be read twice."""
    import tempfile  # not needed by most runs

    fd, path = tempfile.mkstemp(prefix="layernorm-")
    files.callback(os.close, fd)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return fd


def copy_to_spool(fd: int, head: bytes, spool: int) -> None:
    """Copy what was read of a pipe, and all that comes, into a spool."""
    write_next(spool, memoryview(head))
    buffer = memoryview(bytearray(CHUNK))
    while count := read_next(fd, buffer):
        write_next(spool, buffer[:count])
