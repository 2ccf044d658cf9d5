"""The numba engine: compiled, one pass over memory, free of the interpreter's lock; exact as numpy's.

Extreme and constant rows are left to the reference.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from ..norm.backward import BackwardKernel, by_segments, close_rows, finite_rows, segment_rows
from ..norm.forward import (
    NEARLY_CONSTANT,
    TILE_ELEMENTS,
    TINY,
    VISIBLE,
    Kernel,
    RowStats,
    concatenate,
    overflow_counter,
    row_kernel,
)
from ..norm.rounding import round_into, widen_into
from ..norm.spec import Norm
from ..norm.sums import SQUARES_SEGMENT

__all__ = ["prepare", "prepare_backward"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker."""
    reference = row_kernel(norm, width)
    count_overflow = overflow_counter(norm, width)
    gamma = np.ones(width) if norm.gamma is None else norm.gamma
    beta = np.zeros(width) if norm.beta is None else norm.beta
    rows_per_tile = max(1, TILE_ELEMENTS // width)
    wide_x, wide_y = np.empty((2, rows_per_tile, width))

    def tile_kernel(x: Array, y: Array | None) -> RowStats:
        count = len(x)
        mean, var, rstd = np.empty((3, count))
        extreme = np.empty(count, np.bool_)
        source, target = x, y
        if not _is_native(x):
            source = wide_x[:count]
            widen_into(x, wide_x[:count])
        if y is None or not _is_native(y):
            target = wide_y[:count]
        layer = norm.kind == "layer"
        _rows(source, target, gamma, beta, norm.eps, layer, y is not None, mean, var, rstd, extreme)
        if y is not None and target is not y:
            round_into(wide_y[:count], y)
        stats = RowStats(mean, var, rstd, np.zeros(count, np.bool_), np.zeros(count, np.bool_))
        if extreme.any():
            _treat_extreme(np.flatnonzero(extreme), x, y, stats, reference)
        return stats if y is None else stats._replace(overflow=count_overflow(y, stats))

    def kernel(x: Array, y: Array | None) -> RowStats:
        starts = range(0, max(len(x), 1), rows_per_tile)
        tiles = [slice(start, start + rows_per_tile) for start in starts]
        return concatenate([tile_kernel(x[tile], None if y is None else y[tile]) for tile in tiles])

    return kernel


def prepare_backward(norm: Norm, width: int, device: str = "cpu") -> BackwardKernel:
    """Return a backward kernel for one worker; xhat and rstd are those of the forward kernel."""
    rows = segment_rows(width)
    standardize = prepare(Norm(norm.kind, norm.eps), width)
    gamma = np.ones(width) if norm.gamma is None else norm.gamma
    xhat_work, work = np.empty((2, rows, width))

    def segment(x: Array, dy: Array, dx: Array | None) -> tuple[RowStats, Float64, Float64]:
        xhat, g = xhat_work[: len(x)], work[: len(x)]
        stats = standardize(x, xhat)
        widen_into(dy, g)
        dgamma, dbeta = np.empty((2, width))
        sums = np.empty(len(x))
        _sums(xhat, g, dgamma, dbeta, sums)
        finite = finite_rows(g, sums)
        if dx is not None:
            _gradients(xhat, stats.rstd, gamma, norm.kind == "layer", g)
        return close_rows(stats, finite, g, dx), dgamma, dbeta

    return by_segments(segment, width)


def _is_native(array: Array) -> bool:
    return array.dtype.kind == "f" and array.dtype.itemsize >= 4 and array.dtype.isnative


def _treat_extreme(
    which: npt.NDArray[np.intp], x: Array, y: Array | None, stats: RowStats, reference: Kernel
) -> None:
    """Put the reference's results for these rows into y and the statistics."""
    rows = None if y is None else np.empty((len(which), x.shape[1]), y.dtype)
    special = reference(x[which], rows)
    if y is not None and rows is not None:
        y[which] = rows
    for ours, theirs in zip(stats[:-1], special[:-1], strict=True):
        ours[which] = theirs


@njit(nogil=True, cache=True)
def _rows(x, y, gamma, beta, eps, layer, write, mean, var, rstd, extreme):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    row = np.empty(width)
    for i in range(x.shape[0]):
        for j in range(width):
            row[j] = x[i, j]
        m = _total(row) / width
        residual = 0.0
        if layer:
            for j in range(width):
                row[j] -= m
            residual = _total(row) / width
        v = _squares(row) / width
        spread = math.sqrt(v)
        odd = not v + eps < 1 / TINY or v + eps < TINY or not abs(m) < 1 / TINY
        if layer:
            odd = odd or abs(residual) > spread / 32 or spread <= NEARLY_CONSTANT * abs(m)
            if not abs(residual) <= VISIBLE * spread:
                for j in range(width):
                    row[j] -= residual
                m += residual
                v -= residual * residual
        else:
            odd = odd or v - m * m <= 2.0**-40 * v
        scale = _inverse_root(v, eps)
        mean[i], var[i], rstd[i], extreme[i] = m, v, scale, odd
        if write and not odd:
            for j in range(width):
                y[i, j] = row[j] * scale * gamma[j] + beta[j]


# Reassociation lets the compiler keep several sums at once; it leaves NaN and inf alone, and the
# order still depends on the length only.
@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _total(row):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(row.size):
        total += row[j]
    return total


@njit(nogil=True, cache=True)
def _squares(row):  # type: ignore[no-untyped-def]
    total, lost = 0.0, 0.0
    for start in range(0, row.size, SQUARES_SEGMENT):
        part = _squares_of(row[start : start + SQUARES_SEGMENT])
        larger = total + part
        back = larger - total
        lost += (total - (larger - back)) + (part - back)
        total = larger
    return total + lost


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _squares_of(part):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(part.size):  # from 0 on: an index that might be negative is not vectorized
        total += part[j] * part[j]
    return total


@njit(nogil=True, cache=True)
def _inverse_root(v, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(v + eps) to the last bit but rarely: one Newton step with the products' own errors."""
    t = v + eps
    other = t - v
    t_error = (v - (t - other)) + (eps - other)
    s = 1 / math.sqrt(t)
    square, square_error = _product(s, s)
    one, one_error = _product(t, square)
    return s + 0.5 * s * (1 - one - one_error - t * square_error - t_error * square)


@njit(nogil=True, cache=True)
def _product(a, b):  # type: ignore[no-untyped-def]
    """a * b, and what its rounding lost (Dekker)."""
    c = 134217729.0 * a
    a_high = c - (c - a)
    c = 134217729.0 * b
    b_high = c - (c - b)
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


@njit(nogil=True, cache=True)
def _sums(xhat, dy, dgamma, dbeta, sums):  # type: ignore[no-untyped-def]
    """The segment's dgamma and dbeta, with what each addition rounds off; and the sums of dy's rows."""
    width = dy.shape[1]
    lost_gamma, lost_beta = np.zeros(width), np.zeros(width)
    dgamma[:] = 0
    dbeta[:] = 0
    for i in range(dy.shape[0]):
        sums[i] = _total(dy[i])
        for j in range(width):
            _add(dgamma, lost_gamma, j, dy[i, j] * xhat[i, j])
            _add(dbeta, lost_beta, j, dy[i, j])
    for j in range(width):
        if math.isfinite(dgamma[j]):
            dgamma[j] += lost_gamma[j]
        if math.isfinite(dbeta[j]):
            dbeta[j] += lost_beta[j]


@njit(nogil=True, cache=True, inline="always")
def _add(total, lost, j, part):  # type: ignore[no-untyped-def]
    larger = total[j] + part
    back = larger - total[j]
    lost[j] += (total[j] - (larger - back)) + (part - back)
    total[j] = larger


@njit(nogil=True, cache=True)
def _gradients(xhat, rstd, gamma, layer, g):  # type: ignore[no-untyped-def]
    """Replace dy in g by dx."""
    width = g.shape[1]
    for i in range(g.shape[0]):
        row, unit = g[i], xhat[i]
        for j in range(width):
            row[j] *= gamma[j]
        if layer:
            mean = _total(row) / width
            for j in range(width):
                row[j] -= mean
        slope = _dot(row, unit) / width
        for j in range(width):
            row[j] = (row[j] - unit[j] * slope) * rstd[i]


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _dot(row, other):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(row.size):
        total += row[j] * other[j]
    return total
