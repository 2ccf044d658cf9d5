"""Outputs: whole under their final name or not there at all, and written by rows from any worker."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import OutputError, PipeClosed, UsageError
from ..norm.dtypes import DType
from .exact_io import open_spool, reason, reserve, write_at, write_next
from .npy import npy_header
from .refs import is_address
from .rows import bytes_of
from .safetensors import SafetensorsEntry, safetensors_header

__all__ = [
    "STDOUT",
    "Output",
    "canonical",
    "check_output",
    "name_of_temporary",
    "open_output",
    "open_part",
    "open_text_output",
    "temporary_name",
    "write_whole",
]

Array = npt.NDArray[np.generic]
STDOUT = "-"
SUFFIXES = (".npy", ".safetensors")
UNRESERVED = 1 << 18  # bytes: so few are written sooner than room for them is reserved
LONGEST_NAME = 255  # bytes, in most file systems


class Output(Protocol):
    """A tensor file being written; sequential ones take their rows in order."""

    @property
    def sequential(self) -> bool: ...

    def write_rows(self, name: str, start: int, rows: Array) -> None: ...


class _FileOutput(NamedTuple):
    path: str
    fd: int
    offsets: dict[str, int]
    sequential: bool = False

    def write_rows(self, name: str, start: int, rows: Array) -> None:
        at = self.offsets[name] + start * rows[:1].nbytes
        with _output_errors(self.path):
            write_at(self.fd, bytes_of(rows), at)


class _PipeOutput(NamedTuple):
    path: str
    fd: int
    sequential: bool = True

    def write_rows(self, name: str, start: int, rows: Array) -> None:
        with _output_errors(self.path):
            write_next(self.fd, bytes_of(rows))


def canonical(path: str | None) -> str | None:
    """Return the path of an output, - for all the names of standard output."""
    return STDOUT if path in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else path


def check_output(path: str, suffixes: tuple[str, ...], force: bool) -> None:
    """Raise what open_output would raise for this path, before any work is done."""
    _place(path, suffixes, force)


def _place(path: str, suffixes: tuple[str, ...], force: bool) -> str | None:
    """The file that an output will be, None for a stream; Raises for what it cannot be."""
    if path == STDOUT:
        return None
    if is_address(path):
        from .remote import check_upload

        _check_suffix(path, suffixes)
        check_upload(path, force)
        return path
    mode, final = _what_is_at(path)
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    _check_suffix(path, suffixes)
    if mode is not None and stat.S_ISDIR(mode):
        raise OutputError(path, "is a directory", "a file name")
    if mode is None and not os.path.isdir(os.path.dirname(final) or os.curdir):
        raise OutputError(path, "its directory does not exist", None, "mkdir -p it first")
    if not force and os.path.lexists(path):
        raise UsageError(path, "exists already", "a new name", "--force to replace it")
    return final


def _check_suffix(path: str, suffixes: tuple[str, ...]) -> None:
    if not path.endswith(suffixes):
        raise UsageError(path, "unknown output format", f"a name ending in {' or '.join(suffixes)}")


@contextlib.contextmanager
def open_output(
    path: str,
    tensors: dict[str, tuple[DType, tuple[int, ...]]],
    metadata: dict[str, str],
    force: bool = False,
    *,
    copies: Mapping[str, SafetensorsEntry] | None = None,
    on_whole: Callable[[int, str], None] | None = None,
    label: str | None = None,
) -> Iterator[Output]:
    """Write tensors (name -> dtype and shape) to path: .safetensors, .npy (one tensor), or - for stdout.

    The file appears under its name when the block ends without an error, and replaces an existing
    one with force only. Its mode follows the umask; a symbolic link keeps pointing to it. copies are
    tensors of a safetensors file, whose bytes are written as rows of uint8. on_whole is told the
    descriptor and the temporary name of the file just before it gets its own. path may be an address:
    then the file is uploaded when it is whole, and an object store keeps label beside it.

    Raises UsageError for what the format cannot hold, OutputError where the system refuses.
    """
    final = _place(path, SUFFIXES, force)
    header, offsets, size = _layout(path, tensors, metadata, copies)
    if final is None:
        if path.endswith(".safetensors") and (len(tensors) > 1 or copies):
            raise OutputError(path, "is not a regular file", "a file for more than one tensor")
        with _open_pipe(path) as fd:
            with _output_errors(path):
                write_next(fd, memoryview(header))
            yield _PipeOutput(path, fd)
        return
    with _atomic(path, final, on_whole, label) as fd:
        with _output_errors(path):
            if size > UNRESERVED:
                reserve(fd, size)
            write_at(fd, memoryview(header), 0)
        yield _FileOutput(path, fd, offsets)


def _layout(
    path: str,
    tensors: dict[str, tuple[DType, tuple[int, ...]]],
    metadata: dict[str, str],
    copies: Mapping[str, SafetensorsEntry] | None = None,
) -> tuple[bytes, dict[str, int], int]:
    """The header of an output, where in the file each tensor begins, and the size of all."""
    if path.endswith(".safetensors"):
        return safetensors_header(tensors, metadata, copies)
    if len(tensors) > 1 or copies:
        raise UsageError(path, "cannot hold several tensors", "an output ending in .safetensors")
    ((name, (dtype, shape)),) = tensors.items()
    if not dtype.in_numpy:
        raise UsageError(
            path,
            f"npy files cannot hold {dtype.name}",
            "an output ending in .safetensors",
            "that, or --dtype float32",
        )
    header = npy_header(dtype, shape)
    return header, {name: len(header)}, len(header) + math.prod(shape) * dtype.itemsize


@contextlib.contextmanager
def open_part(
    path: str,
    temporary: str,
    tensors: dict[str, tuple[DType, tuple[int, ...]]],
    metadata: dict[str, str],
) -> Iterator[Output]:
    """Write some rows of an output that several machines make, under its temporary name.

    Whoever opens it first makes it; the header is the same bytes each time. Raises as open_output.
    """
    header, offsets, size = _layout(path, tensors, metadata)
    with _output_errors(path):
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with _output_errors(path):
            reserve(fd, size)
            write_at(fd, memoryview(header), 0)
        yield _FileOutput(path, fd, offsets)
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_text_output(path: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that appends text to a file, which appears when it is whole."""
    with _open_anything(path) as fd:

        def write(text: str) -> None:
            with _output_errors(path):
                write_next(fd, memoryview(text.encode()))

        yield write


def write_whole(path: str, data: bytes) -> None:
    """Write a file that is not made of rows, such as a picture; it appears when it is whole."""
    with _open_anything(path) as fd, _output_errors(path):
        write_next(fd, memoryview(data))


def _open_anything(path: str) -> contextlib.AbstractContextManager[int]:
    mode, final = _what_is_at(path)
    is_stream = mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return _open_pipe(path) if is_stream else _atomic(path, final)


@contextlib.contextmanager
def _atomic(
    path: str,
    final: str,
    on_whole: Callable[[int, str], None] | None = None,
    label: str | None = None,
) -> Iterator[int]:
    """A descriptor of a temporary sibling that becomes final if the block ends without an error.

    path is what the output is called by the user.
    """
    if is_address(path):
        with _uploaded(path, label) as spool:
            yield spool
        return
    temporary = temporary_name(final)
    fd = None
    try:
        with _output_errors(path):  # in the try: a signal may come when the file is there already
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        yield fd
        with _output_errors(path):
            if on_whole is not None:
                on_whole(fd, temporary)
            os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def _uploaded(path: str, label: str | None) -> Iterator[int]:
    """A descriptor of a file without a name, which is uploaded if the block ends without an error."""
    from .remote import upload

    with contextlib.ExitStack() as files:
        with _output_errors("a temporary file"):
            fd = open_spool(files)
        yield fd
        upload(path, f"/dev/fd/{fd}", os.fstat(fd).st_size, label)


def temporary_name(path: str) -> str:
    """Return a new name beside path for a file that is not whole yet."""
    folder, name = os.path.split(path)
    if len(os.fsencode(name)) > LONGEST_NAME - 14:
        name = name[:50]
    return os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")


def name_of_temporary(name: str) -> str | None:
    """Return the name of the file that a temporary one was to become; None for any other name.

    >>> name_of_temporary(".x.npy.0123abcd.tmp")
    'x.npy'
    """
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name, re.DOTALL)
    return match and match[1]


@contextlib.contextmanager
def _open_pipe(path: str) -> Iterator[int]:
    with _output_errors(path):
        fd = os.dup(1) if path == STDOUT else os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _output_errors:  # noqa: N801  # contextlib's would take as long as what it is around
    """Raise what the system says of an output as PipeClosed, or OutputError with its path."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, BrokenPipeError):
            raise PipeClosed from None
        if isinstance(error, OSError):
            raise OutputError(self.path, reason(error)) from None


def _what_is_at(path: str) -> tuple[int | None, str]:
    """The mode of the file that path leads to, None where there is none, and its path."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None, path
    if not stat.S_ISLNK(mode):
        return mode, path
    final = os.path.realpath(path)
    try:
        return os.stat(path).st_mode, final  # not of final: /dev/fd/1 leads to what has no path
    except OSError:
        return None, final
