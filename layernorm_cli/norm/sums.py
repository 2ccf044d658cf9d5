"""Sums along rows: small error, and an order that depends on the width alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["SQUARES_SEGMENT", "Dot", "add_exactly", "row_dots", "sum_rows", "work_space"]

Float64 = npt.NDArray[np.float64]
Floating = npt.NDArray[np.floating]
Dot = Callable[[Float64, Float64], Floating]

FloatT = TypeVar("FloatT", bound=np.floating)

SEGMENT = 4096  # BLAS may split longer dot products over threads
SQUARES_SEGMENT = 128  # the error of var is every element's, and grows with the length of the sums
REST_SEGMENT = 16  # what its vectors leave over, a BLAS adds one after another
FEW = 16  # so many sums of segments may be added one after another, in one call
NARROW = 32  # below this width the loops run down the columns instead of along the rows


def sum_rows(x: npt.NDArray[FloatT]) -> npt.NDArray[FloatT]:
    """Sum each row of x (r, d) floating by folding it in half until one column, (r,), is left.

    The error grows with log2(d), and a row's sum has the same bits whatever rows stand around it.
    """
    if x.shape[1] == 0:
        return np.zeros(len(x), x.dtype)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        if x.shape[1] % 2:
            folded[:, 0] += x[:, -1]
        x = folded
    return x[:, 0].copy()


def add_exactly(total: Float64, lost: Float64, part: Float64) -> None:
    """Add part to total in place, and what the addition rounds off to lost (Knuth's two-sum).

    total + lost is the sum to twice float64's precision, as long as none of it is infinite.
    """
    with np.errstate(all="ignore"):
        larger = total + part
        back = larger - total
        lost += (total - (larger - back)) + (part - back)
    total[...] = larger


def work_space(rows: int, width: int) -> Float64:
    """An empty (rows, width) float64 array in the layout that the width is fastest in.

    Wide rows each start on a cache line, since a BLAS may add in another order off one.
    """
    if width < NARROW:
        return np.empty((width, rows)).T
    stride = -(-width // 8) * 8
    memory = np.empty(rows * stride + 8)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + rows * stride].reshape(rows, stride)[:, :width]


def row_dots(work: Float64) -> tuple[Dot, Dot]:
    """Dot products of rows: with ones, and more exactly with themselves."""
    width = work.shape[1]
    if width < NARROW:
        return (_narrow_dot(work),) * 2
    squares_dot = _wide_dot(work, SQUARES_SEGMENT, width - width % NARROW, REST_SEGMENT, np.longdouble)
    return _wide_dot(work, SEGMENT, width, SEGMENT, float), squares_dot


def _wide_dot(like: Float64, segment: int, whole: int, rest_segment: int, sum_type: type) -> Dot:
    """Dot products along rows, in segments whose sums are then added as sum_type, many of them in pairs.

    The segments are shorter from whole on.
    """
    width = like.shape[1]
    if width <= segment == rest_segment:
        return np.vecdot
    count = whole // segment  # the equal segments take one call
    even = count * segment
    starts = [*range(even, whole, segment), *range(whole, width, rest_segment)]
    parts = [slice(*ends) for ends in pairwise([*starts, width])]
    sums = np.zeros((count + len(parts), len(like)))  # casting whatever was there may be slow
    wide: Floating = np.empty(sums.shape, sum_type)

    def cut(a: Float64) -> Float64:
        return a[..., :even].reshape(*a.shape[:-1], count, segment)

    def dot(a: Float64, b: Float64) -> Floating:
        out = sums.T[: len(a)]
        np.vecdot(cut(a), cut(b), out=out[:, :count])
        for column, part in enumerate(parts, count):
            np.vecdot(a[:, part], b[..., part], out=out[:, column])
        np.copyto(wide, sums)
        if len(wide) > FEW:
            return sum_rows(wide.T[: len(a)])
        total: Floating = np.add.reduce(wide)
        return total[: len(a)]

    return dot


def _narrow_dot(like: Float64) -> Dot:
    """Dot products of many short rows, whole columns at a time."""
    products = np.empty_like(like)

    def dot(a: Float64, b: Float64) -> Float64:
        product = products[: len(a)]
        np.multiply(a, b, out=product)
        return sum_rows(product)

    return dot
