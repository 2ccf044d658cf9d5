"""Where rows come from: each source reads a range of rows of one tensor as a (rows, width) array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from .bytes_at import Source, least_bytes, read_at
from .exact_io import read_next, reserve, write_at

__all__ = [
    "TOO_LARGE",
    "ColumnRows",
    "FileRows",
    "PartOfRows",
    "PipeRows",
    "RowSource",
    "bytes_of",
    "fits_numpy",
    "fortran_row",
    "memory_of",
    "split",
    "to_c_order",
]

Array = npt.NDArray[np.generic]
COLUMN_BLOCK_BYTES = 1 << 22
TOO_LARGE = "at most 64 dimensions and 2**60 elements"


class RowSource(Protocol):
    """Rows of one tensor; sequential ones must be read in order, and by one thread at a time."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def storage(self) -> np.dtype[np.generic]: ...

    @property
    def sequential(self) -> bool: ...

    @property
    def forkable(self) -> bool:
        """Whether processes forked from this one can read it too."""
        ...

    @property
    def least_rows(self) -> int:
        """How many rows to read at a time at the least, for reads of a good size."""
        ...

    def read_rows(self, start: int, stop: int, block: Array | None = None) -> Array:
        """Read rows start to stop into block, (stop - start, width) of storage, or a new one."""
        ...


def bytes_of(array: Array) -> memoryview:
    """The memory of an array as bytes, of a copy if it is not in C order.

    numpy has no buffers of bfloat16 and float8.
    """
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def memory_of(array: Array) -> memoryview:
    """The memory of a C-ordered array as bytes, to read into.

    Raises ValueError for any other array: its bytes in order are a copy, and reading would fill that.
    """
    if not array.flags.c_contiguous:
        raise ValueError("rows are read into C-ordered memory only")
    return bytes_of(array)


class FileRows(NamedTuple):
    """Rows that follow on each other in a file."""

    source: Source
    offset: int
    storage: np.dtype[np.generic]
    rows: int
    width: int
    where: str
    sequential: bool = False

    @property
    def forkable(self) -> bool:
        return isinstance(self.source, int)

    @property
    def least_rows(self) -> int:
        return -(-least_bytes(self.source) // (self.width * self.storage.itemsize))

    def read_rows(self, start: int, stop: int, block: Array | None = None) -> Array:
        block = np.empty((stop - start, self.width), self.storage) if block is None else block
        row_bytes = self.width * self.storage.itemsize
        read_at(self.source, memory_of(block), self.offset + start * row_bytes, self.where)
        return block


class ColumnRows(NamedTuple):
    """Rows of a Fortran-ordered matrix: column after column in the file, read in pieces of each."""

    source: Source
    offset: int
    storage: np.dtype[np.generic]
    rows: int
    width: int
    where: str
    sequential: bool = False
    forkable: bool = True

    @property
    def least_rows(self) -> int:
        return max(1, COLUMN_BLOCK_BYTES // (self.width * self.storage.itemsize))

    def read_rows(self, start: int, stop: int, block: Array | None = None) -> Array:
        columns = np.empty((self.width, stop - start), self.storage)
        size = self.storage.itemsize
        for index in range(self.width):
            at = self.offset + (index * self.rows + start) * size
            read_at(self.source, memory_of(columns[index]), at, self.where)
        if block is None:
            return np.ascontiguousarray(columns.T)
        block[...] = columns.T
        return block


class PipeRows(NamedTuple):
    """Rows that come through a pipe; warn is told of bytes behind the last row."""

    fd: int
    storage: np.dtype[np.generic]
    rows: int
    width: int
    where: str
    warn: Callable[[int], None]
    sequential: bool = True
    forkable: bool = False
    least_rows: int = 1

    def read_rows(self, start: int, stop: int, block: Array | None = None) -> Array:
        block = np.empty((stop - start, self.width), self.storage) if block is None else block
        view = memory_of(block)
        count = read_next(self.fd, view)
        row_bytes = self.width * self.storage.itemsize
        if count < len(view):
            raise FormatError(
                self.where,
                f"truncated: {start * row_bytes + count} bytes of data",
                f"{self.rows * row_bytes} bytes",
                "running what writes it again",
            )
        if stop == self.rows:
            self._drain()
        return block

    def _drain(self) -> None:
        buffer = memoryview(bytearray(1 << 16))
        surplus = 0
        while count := read_next(self.fd, buffer):
            surplus += count
        if surplus:
            self.warn(surplus)


class PartOfRows(NamedTuple):
    """Some rows of another source, counted from the first of them."""

    whole: RowSource
    first: int
    rows: int

    @property
    def width(self) -> int:
        return self.whole.width

    @property
    def storage(self) -> np.dtype[np.generic]:
        return self.whole.storage

    @property
    def sequential(self) -> bool:
        return self.whole.sequential

    @property
    def forkable(self) -> bool:
        return self.whole.forkable

    @property
    def least_rows(self) -> int:
        return self.whole.least_rows

    def read_rows(self, start: int, stop: int, block: Array | None = None) -> Array:
        return self.whole.read_rows(self.first + start, self.first + stop, block)


def split(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    """Return how many rows a shape has, and how wide they are, normalized from axis on (0 or more)."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def fits_numpy(shape: Sequence[int]) -> bool:
    """Return whether numpy can hold any array of this shape; an empty one counts with its other axes."""
    return len(shape) <= 64 and math.prod(max(n, 1) for n in shape) < 1 << 60


def fortran_row(columns: ColumnRows, shape: tuple[int, ...], axis: int, index: int) -> Array:
    """Read one row, from axis on and flat, of a Fortran-ordered tensor; index counts rows in C order.

    columns are its rows along the last axis, in Fortran order.
    """
    leading, between = shape[:axis], shape[axis:-1]
    at = np.unravel_index(index, leading) if leading else ()
    places = (
        int(np.ravel_multi_index((*at, *inner), shape[:-1], order="F")) if shape[:-1] else 0
        for inner in np.ndindex(between)
    )
    return np.concatenate([columns.read_rows(place, place + 1)[0] for place in places])


def to_c_order(
    fd: int, offset: int, storage: np.dtype[np.generic], shape: tuple[int, ...], where: str, spool: int
) -> None:
    """Write a Fortran-ordered tensor in C order into a spool, in constant memory.

    A run of leading indices in Fortran order is contiguous in each column of the last axis; each of
    its rows then goes to its own place.
    """
    leading, width = shape[:-1], shape[-1]
    columns = ColumnRows(fd, offset, storage, math.prod(leading), width, where)
    row_bytes = width * storage.itemsize
    reserve(spool, columns.rows * row_bytes)
    for start in range(0, columns.rows, columns.least_rows):
        stop = min(columns.rows, start + columns.least_rows)
        block = columns.read_rows(start, stop)
        places = np.ravel_multi_index(np.unravel_index(np.arange(start, stop), leading, "F"), leading)
        for row, place in zip(block, places.tolist(), strict=True):
            write_at(spool, bytes_of(row), place * row_bytes)
