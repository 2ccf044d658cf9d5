"""Bytes at an offset, of a file here or on another machine, and what lies beside it.

A source is a descriptor, or a RemoteFile where the path is an address. `remote` is imported for
addresses only.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from ..errors import InputError
from . import exact_io
from .exact_io import reason, truncated
from .refs import is_address, without_secrets

if TYPE_CHECKING:
    from .remote import RemoteFile

__all__ = [
    "Source",
    "as_file",
    "join",
    "least_bytes",
    "list_dir",
    "open_source",
    "parent",
    "read_at",
    "read_ranges",
    "read_small",
    "read_upto",
    "size_of",
]

Source: TypeAlias = "int | RemoteFile"
SMALL = 64 << 20
REMOTE_READ = 1 << 22  # a request's way there and back costs as much as about so many bytes
FILE_BUFFER = 1 << 20


@contextlib.contextmanager
def open_source(path: str, where: str | None = None) -> Iterator[Source]:
    """Open a file here or at an address, to read bytes at any offset.

    Raises InputError, in the name of where if given, for what is missing, a directory or unreadable.
    """
    where = without_secrets(path) if where is None else where
    if is_address(path):
        from .remote import open_remote

        yield open_remote(path, where)
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(where, reason(error)) from error
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise InputError(where, "is a directory", "a .npy, .npz or .safetensors file")
        yield fd
    finally:
        os.close(fd)


def size_of(source: Source) -> int:
    """Return a source's size in bytes."""
    return os.fstat(source).st_size if isinstance(source, int) else source.size


def least_bytes(source: Source) -> int:
    """Return how many bytes to read at a time at the least, for reads of a good size."""
    return 1 if isinstance(source, int) else REMOTE_READ


def read_at(source: Source, view: memoryview, offset: int, where: str) -> None:
    """Fill view from the bytes at offset; Raises FormatError where the file ends before."""
    if isinstance(source, int):
        exact_io.read_at(source, view, offset, where)
    elif offset + len(view) > source.size:
        raise truncated(where, max(source.size, offset), offset + len(view))
    else:
        view[:] = source.read(offset, len(view))


def read_upto(source: Source, count: int, offset: int) -> bytes:
    """Return count bytes at offset, fewer where the file ends before."""
    if isinstance(source, int):
        return os.pread(source, count, offset)
    return source.read(offset, max(0, min(count, source.size - offset)))


def read_ranges(source: Source, ranges: Sequence[tuple[int, int]], where: str) -> list[bytes]:
    """Return the bytes of many (offset, size); from afar, neighbours together and several at once.

    Raises FormatError where the file ends before the end of one.
    """
    if isinstance(source, int):
        blocks = []
        for offset, count in ranges:
            block = bytearray(count)
            exact_io.read_at(source, memoryview(block), offset, where)
            blocks.append(bytes(block))
        return blocks
    size = source.size
    for offset, count in ranges:
        if offset + count > size:
            raise truncated(where, max(size, offset), offset + count)
    return source.read_ranges(ranges)


def as_file(source: Source) -> io.BufferedReader:
    """Return a file object that reads a source, for libraries that need one."""
    if isinstance(source, int):
        return os.fdopen(os.dup(source), "rb")
    return io.BufferedReader(_RawFile(source), FILE_BUFFER)


class _RawFile(io.RawIOBase):
    def __init__(self, source: RemoteFile) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise ValueError("a negative position")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # a plain memory buffer
        data = read_upto(self._source, len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def read_small(path: str) -> bytes | None:
    """Return all of a small file (config.json, an index), None where there is none.

    None as well where a server keeps it from us: S3 answers so for names that do not exist.

    Raises InputError where it cannot be read, or is too large to be what it should be.
    """
    try:
        with open_source(path) as source:
            size = size_of(source)
            if size > SMALL:
                raise InputError(without_secrets(path), f"has {size} bytes", f"at most {SMALL}")
            return read_ranges(source, [(0, size)], without_secrets(path))[0]
    except InputError as error:
        absent = FileNotFoundError, NotADirectoryError, *((PermissionError,) * is_address(path))
        if isinstance(error.__cause__, absent):
            return None
        raise


def list_dir(path: str) -> list[str] | None:
    """Return the sorted names in a directory; None for what is none, and over HTTP, which has none."""
    if is_address(path):
        from .remote import list_remote

        return list_remote(path)
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(path, reason(error)) from error


def parent(path: str) -> str:
    """Return the directory that a file lies in.

    >>> parent("https://host/a/x.npy?key=1")
    'https://host/a?key=1'
    """
    if not is_address(path):
        return os.path.dirname(path) or os.curdir
    place, query = _split_query(path)
    return place.rpartition("/")[0] + query


def join(path: str, name: str) -> str:
    """Return the path of a file in a directory; an address keeps its query.

    >>> join("https://host/a?key=1", "x.npy")
    'https://host/a/x.npy?key=1'
    >>> join("a", "x.npy")
    'a/x.npy'
    """
    if not is_address(path):
        return os.path.join(path, name)
    place, query = _split_query(path)
    name = quote(name) if path.lower().startswith("http") else name
    return f"{place.rstrip('/')}/{name}{query}"


def _split_query(address: str) -> tuple[str, str]:
    """An http address without its query, and that; elsewhere a '?' is a character like any other."""
    if not address.lower().startswith(("http://", "https://")):
        return address, ""
    place, mark, query = address.partition("?")
    return place, mark + query
