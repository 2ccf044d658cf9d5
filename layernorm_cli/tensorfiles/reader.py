"""Open the tensor that a ref names, whatever file it is in."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, InputError, UsageError
from ..norm.dtypes import DTYPES, DType, numpy_dtype
from .bytes_at import Source, open_source, read_at, read_upto, size_of
from .exact_io import CHUNK, copy_to_spool, open_spool, read_next, reason, write_next
from .npy import NpyHeader, read_npy_header
from .refs import STDIN, Ref, find_name, find_names, parse_ref
from .rows import ColumnRows, FileRows, PipeRows, RowSource, split, to_c_order
from .safetensors import (
    SafetensorsEntry,
    SafetensorsHeader,
    header_length,
    read_safetensors_header,
)
from .sniff import HEAD_SIZE, told_format

__all__ = ["Tensor", "TensorFile", "open_tensor", "open_tensors", "read_safetensors"]


class Tensor(NamedTuple):
    """An open tensor: its ref as typed, its name in the file, dtype and shape; rows(axis) reads it.

    warnings grows while a pipe is read. columns are the rows along the last axis of a Fortran-ordered
    file, in the file's order; None for others.
    """

    ref: str
    name: str | None
    dtype: DType
    shape: tuple[int, ...]
    rows: Callable[[int], RowSource]
    warnings: list[str]
    columns: ColumnRows | None = None

    def read(self) -> npt.NDArray[np.generic]:
        """Return the whole tensor as an array of its shape."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, numpy_dtype(self.dtype))
        return self.rows(0).read_rows(0, 1).reshape(self.shape)


class TensorFile(NamedTuple):
    """The tensors of one open file that a ref means.

    Of a safetensors file also where in source its others lie, and its metadata.
    """

    tensors: tuple[Tensor, ...]
    source: Source | None = None
    others: dict[str, SafetensorsEntry] | None = None
    metadata: dict[str, str] | None = None

    def bytes_of(self, entry: SafetensorsEntry) -> Iterator[memoryview]:
        """Yield the bytes of one of the others in pieces."""
        assert self.source is not None
        buffer = memoryview(bytearray(min(entry.size, CHUNK)))
        for at in range(0, entry.size, CHUNK):
            part = buffer[: min(CHUNK, entry.size - at)]
            read_at(self.source, part, entry.offset + at, self.tensors[0].ref)
            yield part


@contextlib.contextmanager
def open_tensor(ref: str | Ref, assume_dtype: DType | None = None) -> Iterator[Tensor]:
    """Open the tensor that a ref names: FILE, FILE#NAME or - in npy, npz or safetensors format.

    FILE may be an address, such as https://host/x.npy, of which only what is needed is fetched; or the
    index of a sharded checkpoint, or its directory.

    assume_dtype is what raw elements without a type (as numpy.save leaves of bfloat16) are taken for.

    Raises InputError where the file or tensor is missing or cannot be read, and its FormatError where
    the file is malformed or something else; nothing is ever unpickled.

    >>> import numpy, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> numpy.save(path, [[2.0, 6.0]])
    >>> with open_tensor(path) as tensor:
    ...     tensor.dtype.name, tensor.shape, tensor.read().tolist()
    ('float64', (1, 2), [[2.0, 6.0]])
    """
    ref = _located(parse_ref(ref) if isinstance(ref, str) else ref)
    with contextlib.ExitStack() as files:
        try:
            source = _open(ref, files)
            if isinstance(source, int) and _must_be_read_in_order(source):
                tensor = _tensor_in_pipe(source, ref, assume_dtype, files)
            else:
                tensor = _tensor_in_file(source, ref, assume_dtype, files)
        except OSError as error:
            raise InputError(ref.text, reason(error)) from None
        yield tensor


@contextlib.contextmanager
def open_tensors(ref: Ref, assume_dtype: DType | None = None) -> Iterator[TensorFile]:
    """Open all tensors of a file that a ref names, which may be a glob; else as open_tensor.

    The one tensor of an npy file has no name: the glob * means it as well.
    """
    ref = _located(ref)
    with contextlib.ExitStack() as files:
        try:
            source = _open(ref, files)
            if isinstance(source, int) and _must_be_read_in_order(source):
                found = TensorFile((_tensor_in_pipe(source, ref, assume_dtype, files),))
            else:
                found = _tensors_in_file(source, ref, assume_dtype, files)
        except OSError as error:
            raise InputError(ref.text, reason(error)) from None
        yield found


def _located(ref: Ref) -> Ref:
    if ref.path.endswith(".index.json") or (ref.name is not None and os.path.isdir(ref.path)):
        from .sharded import ref_in_shard

        return ref_in_shard(ref)
    return ref


def read_safetensors(source: Source, where: str) -> SafetensorsHeader:
    """Read and check the header of an open safetensors file."""
    size = size_of(source)
    length = read_upto(source, 8, 0)
    header = bytearray(header_length(length, size, where))
    read_at(source, memoryview(header), 8, where)
    return read_safetensors_header(length, size, bytes(header), where)


def _open(ref: Ref, files: contextlib.ExitStack) -> Source:
    if ref.path != STDIN:
        return files.enter_context(open_source(ref.path, ref.text))
    fd = os.dup(0)
    files.callback(os.close, fd)
    return fd


def _must_be_read_in_order(fd: int) -> bool:
    """Whether fd is a pipe, a device, or a file that somebody has begun to read."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return True
    return os.lseek(fd, 0, os.SEEK_CUR) != 0


def _tensor_in_file(
    source: Source, ref: Ref, assume: DType | None, files: contextlib.ExitStack
) -> Tensor:
    head = read_upto(source, HEAD_SIZE, 0)
    match told_format(ref.file, ref.file, head):
        case "npy":
            return _npy_tensor(source, 0, size_of(source), None, _without_name(ref), assume, files, head)
        case "npz":
            from .npz import open_member  # zipfile is slow to import

            member, offset, size, name = open_member(source, ref, files)
            return _npy_tensor(member, offset, size, name, ref, assume, files)
        case "safetensors":
            header = read_safetensors(source, ref.file)
            return _safetensors_tensor(source, ref, header, find_name(ref, header.entries), assume)


def _tensors_in_file(
    source: Source, ref: Ref, assume: DType | None, files: contextlib.ExitStack
) -> TensorFile:
    match told_format(ref.file, ref.file, read_upto(source, HEAD_SIZE, 0)):
        case "npy":
            ref = ref._replace(name=None) if ref.name == "*" else ref
            return TensorFile((_tensor_in_file(source, ref, assume, files),))
        case "npz":
            from .npz import member_names

            refs = _one_by_one(ref, find_names(ref, member_names(source, ref.file)))
            return TensorFile(tuple(_tensor_in_file(source, one, assume, files) for one in refs))
        case "safetensors":
            header = read_safetensors(source, ref.file)
            names = find_names(ref, header.entries)
            tensors = tuple(
                _safetensors_tensor(source, one, header, name, assume)
                for one, name in zip(_one_by_one(ref, names), names, strict=True)
            )
            others = {name: entry for name, entry in header.entries.items() if name not in names}
            return TensorFile(tensors, source, others, header.metadata)


def _one_by_one(ref: Ref, names: list[str]) -> list[Ref]:
    """The ref of each tensor that a ref means: as typed where it is one."""
    if len(names) == 1:
        return [ref._replace(name=names[0])]
    return [Ref(f"{ref.file}#{name}", ref.path, name) for name in names]


def _without_name(ref: Ref) -> Ref:
    if ref.name is not None:
        raise UsageError(ref.text, "an npy file holds one tensor without a name", ref.file)
    return ref


def _npy_tensor(
    source: Source,
    base: int,
    size: int,
    name: str | None,
    ref: Ref,
    assume: DType | None,
    files: contextlib.ExitStack,
    head: bytes = b"",
) -> Tensor:
    """The npy in size bytes from base of a file, whose first bytes are known already perhaps."""
    position = base

    def read(count: int) -> bytes:
        nonlocal position
        end = min(position + count, base + size)
        data = head[position:end] if end <= len(head) else read_upto(source, end - position, position)
        position += len(data)
        return data

    header = read_npy_header(read, ref.text, assume)
    found, expected = size - header.data_offset, _data_bytes(header)
    if found < expected:
        raise FormatError(
            ref.text,
            f"truncated: {max(found, 0)} bytes of data",
            f"{expected} bytes for {header.dtype.name} of shape {header.shape}",
            "fetching the file again; it may still be being written",
        )
    warnings = [] if found == expected else [_surplus(ref, found - expected)]

    def rows(axis: int) -> RowSource:
        shape, storage, where = header.shape, header.storage, ref.text
        offset = base + header.data_offset
        if not header.fortran_order:
            return FileRows(source, offset, storage, *split(shape, axis), where)
        try:
            if isinstance(source, int):
                columns = source
            else:  # pieces of columns would be a request each
                columns, offset = _fetched(source, offset, expected, where, files), 0
            if len(shape) == 2 and axis == 1:
                return ColumnRows(columns, offset, storage, *split(shape, axis), where)
            spool = open_spool(files)
            to_c_order(columns, offset, storage, shape, where, spool)
        except OSError as error:
            raise InputError(where, reason(error)) from None
        return FileRows(spool, 0, storage, *split(shape, axis), where)

    columns = None
    if header.fortran_order and header.shape and isinstance(source, int):
        offset = base + header.data_offset
        whole = split(header.shape, len(header.shape) - 1)
        columns = ColumnRows(source, offset, header.storage, *whole, ref.text)
    return Tensor(ref.text, name, header.dtype, header.shape, rows, warnings, columns)


def _fetched(source: Source, offset: int, size: int, where: str, files: contextlib.ExitStack) -> int:
    """A file without a name that holds size bytes of a source."""
    spool = open_spool(files)
    buffer = memoryview(bytearray(min(size, CHUNK)))
    for at in range(0, size, CHUNK):
        part = buffer[: min(CHUNK, size - at)]
        read_at(source, part, offset + at, where)
        write_next(spool, part)
    return spool


def _tensor_in_pipe(fd: int, ref: Ref, assume: DType | None, files: contextlib.ExitStack) -> Tensor:
    """An npy in C order is streamed; anything else is first copied into a file without a name."""
    head = b""

    def read(count: int) -> bytes:
        nonlocal head
        data = bytearray(count)
        data = data[: read_next(fd, memoryview(data))]
        head += data
        return bytes(data)

    if not (magic := read(8)).startswith(b"\x93NUMPY"):
        return _spooled(fd, head, ref, assume, files)
    header = read_npy_header(lambda count: magic if count == 8 else read(count), ref.text, assume)
    if header.fortran_order:
        return _spooled(fd, head, ref, assume, files)
    _without_name(ref)
    warnings: list[str] = []

    def warn(surplus: int) -> None:
        warnings.append(_surplus(ref, surplus))

    def rows(axis: int) -> RowSource:
        return PipeRows(fd, header.storage, *split(header.shape, axis), ref.text, warn)

    return Tensor(ref.text, None, header.dtype, header.shape, rows, warnings)


def _spooled(
    fd: int, head: bytes, ref: Ref, assume: DType | None, files: contextlib.ExitStack
) -> Tensor:
    spool = open_spool(files)
    copy_to_spool(fd, head, spool)
    return _tensor_in_file(spool, ref, assume, files)


def _safetensors_tensor(
    source: Source, ref: Ref, header: SafetensorsHeader, name: str, assume: DType | None
) -> Tensor:
    entry = header.entries[name]
    dtype = next((dtype for dtype in DTYPES.values() if dtype.code == entry.code), None)
    if dtype is None:
        raise FormatError(
            f"{ref.file}#{name}",
            f"dtype {entry.code} has no layer norm here",
            ", ".join(dtype.code for dtype in DTYPES.values()),
        )
    if assume is not None and dtype.kind == "u" and dtype.itemsize == assume.itemsize:
        dtype = assume

    def rows(axis: int) -> RowSource:
        storage = numpy_dtype(dtype)
        return FileRows(source, entry.offset, storage, *split(entry.shape, axis), f"{ref.file}#{name}")

    return Tensor(ref.text, name, dtype, entry.shape, rows, list(header.warnings))


def _data_bytes(header: NpyHeader) -> int:
    return math.prod(header.shape) * header.storage.itemsize


def _surplus(ref: Ref, count: int) -> str:
    return f"{ref.text}: {count} surplus bytes after the tensor; ignored"
