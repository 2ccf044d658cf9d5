"""x and y side by side, as rows that can be read again and again in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .dtypes import DType
from .rounding import widen_into

__all__ = ["Block", "RowPairs", "blocks", "picked_rows", "total"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]

BLOCK_ELEMENTS = 1 << 15  # what is computed of them stays in a core's own cache
READ_ELEMENTS = 1 << 18


class RowPairs(NamedTuple):
    """Rows of x, perhaps of a residual, and of y, of one shape and normalized from axis on.

    read(start, stop) gives x, the residual or None, and y, each (stop - start, width); run is how many
    rows to read at a time at the least.
    """

    shape: tuple[int, ...]
    axis: int
    x: DType
    y: DType
    has_residual: bool
    read: Callable[[int, int], tuple[Array, Array | None, Array]]
    run: int = 1

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return math.prod(self.shape[: self.axis])

    @property
    def width(self) -> int:
        """How many features a row has."""
        return math.prod(self.shape[self.axis :])


class Block(NamedTuple):
    """Some rows, each (r, d) float64: x, the residual or None, y; numbers (r,) says which they are."""

    numbers: npt.NDArray[np.intp]
    x: Float64
    residual: Float64 | None
    y: Float64


def blocks(pairs: RowPairs, multiple: int = 1) -> Iterator[Block]:
    """Yield all rows in order, in blocks of a multiple of so many rows."""
    size = multiple * max(1, BLOCK_ELEMENTS // (pairs.width * multiple))
    read = size * max(1, READ_ELEMENTS // (pairs.width * size), -(-pairs.run // size))
    for start in range(0, pairs.rows, read):
        x, residual, y = pairs.read(start, min(start + read, pairs.rows))
        for at in range(0, len(x), size):
            part = slice(at, at + size)
            yield _block(start + at, x[part], None if residual is None else residual[part], y[part])


def picked_rows(pairs: RowPairs, numbers: npt.NDArray[np.intp]) -> Block:
    """Return the rows of these numbers, which increase."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = [run for run in np.split(numbers, breaks) if len(run)]
    parts = [_block(int(run[0]), *pairs.read(int(run[0]), int(run[-1]) + 1)) for run in runs]
    residuals = [part.residual for part in parts if part.residual is not None]
    return Block(
        numbers,
        np.concatenate([part.x for part in parts]),
        np.concatenate(residuals) if residuals else None,
        np.concatenate([part.y for part in parts]),
    )


def total(block: Block) -> Float64:
    """Return what is to be normalized: x, or x plus the residual."""
    if block.residual is None:
        return block.x
    with np.errstate(all="ignore"):
        return block.x + block.residual


def _block(start: int, x: Array, residual: Array | None, y: Array) -> Block:
    wide_residual = None if residual is None else _wide(residual)
    return Block(np.arange(start, start + len(x)), _wide(x), wide_residual, _wide(y))


def _wide(array: Array) -> Float64:
    out = np.empty(array.shape)
    widen_into(array, out)
    return out
