"""The forward pass over blocks of rows: float64 inside, the same bits for a row wherever it stands.

Every sum runs along one row in an order that depends on the width alone, so neither the rows around
it nor the size of the block can change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .extreme import standardize_extreme
from .rounding import round_into, widen_into
from .spec import Norm
from .sums import row_dots, work_space

__all__ = ["Kernel", "RowStats", "concatenate", "overflow_counter", "row_kernel"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

TILE_ELEMENTS = 96 * 1024  # three quarters of a megabyte of float64: it stays in a core's own cache
UFUNC_BUFFER = 256  # in a larger one numpy copies what it broadcasts along rows: three times as slow
VISIBLE = 2.0**-52  # a residual mean below this many standard deviations is less than an ulp of them
NEARLY_CONSTANT = 2.0**-40  # a spread this small against the mean may be the mean's own rounding
TINY = 1e-280  # squares of smaller numbers lose digits to underflow


class RowStats(NamedTuple):
    """Statistics of r rows, each (r,): mean, var, rstd in float64; constant and nonfinite as bool.

    For rms norms var is the mean square. overflow counts the finite results that do not fit the
    output's dtype.
    """

    mean: Float64
    var: Float64
    rstd: Float64
    constant: Bool
    nonfinite: Bool
    overflow: int = 0


Kernel = Callable[[Array, Array | None], RowStats]
"""kernel(x, y) normalizes x (r, d), any real dtype, into y (r, d), rounded once; for y None it
only returns the statistics."""


def concatenate(parts: list[RowStats]) -> RowStats:
    """Return the statistics of consecutive blocks of rows as one record."""
    if len(parts) == 1:
        return parts[0]
    return RowStats(
        np.concatenate([part.mean for part in parts]),
        np.concatenate([part.var for part in parts]),
        np.concatenate([part.rstd for part in parts]),
        np.concatenate([part.constant for part in parts]),
        np.concatenate([part.nonfinite for part in parts]),
        sum(part.overflow for part in parts),
    )


def row_kernel(norm: Norm, width: int) -> Kernel:
    """Return a kernel for rows of that width; it owns its work space, so each thread needs its own."""
    rows_per_tile = max(1, min(TILE_ELEMENTS // width, 8192))
    work = work_space(rows_per_tile, width)
    count_overflow = overflow_counter(norm, width)
    ones = np.ones(width)
    no_row = np.zeros(rows_per_tile, np.bool_)
    root_width, width_eps = np.sqrt(np.longdouble(width)), np.longdouble(width) * norm.eps
    dot, squares_dot = row_dots(work)

    def tile_kernel(x: Array, y: Array | None) -> RowStats:
        a = work[: len(x)]
        widen_into(x, a)
        mean = dot(a, ones) / width
        if norm.kind == "layer":
            a -= mean[:, None]
            residual = dot(a, ones) / width
        squares = squares_dot(a, a)
        var = squares.astype(np.float64, copy=False) / width
        calm = _is_calm(mean, var, norm.kind)
        if norm.kind == "layer" and not (calm and _is_far_below(residual, VISIBLE, var.min(initial=1))):
            residual[np.abs(residual) <= VISIBLE * np.sqrt(var)] = 0
            if residual.any():
                a -= residual[:, None]
                mean -= 0 - residual  # a mean of -0.0 stays, as it does where no residual is added
                squares -= residual * residual * width
                var = squares.astype(np.float64, copy=False) / width
        scale = (root_width / np.sqrt(squares + width_eps)).astype(np.float64)
        if calm:
            stats = RowStats(mean, var, scale, no_row[: len(x)], no_row[: len(x)])
        else:
            stats = _treat_extreme(x, a, scale, mean, var, norm)
        if y is None:
            return stats
        a *= scale[:, None]
        if norm.gamma is not None:
            a *= norm.gamma
        if norm.beta is not None:
            a += norm.beta
        round_into(a, y)
        return stats._replace(overflow=count_overflow(y, stats))

    def kernel(x: Array, y: Array | None) -> RowStats:
        parts = []
        with np.errstate(all="ignore"):
            np.setbufsize(UFUNC_BUFFER)  # until errstate ends
            for start in range(0, len(x), rows_per_tile):
                tile = slice(start, start + rows_per_tile)
                parts.append(tile_kernel(x[tile], None if y is None else y[tile]))
        return concatenate(parts) if parts else tile_kernel(x, y)

    return kernel


def _is_calm(mean: Float64, var: Float64, kind: str) -> bool:
    """Whether a glance shows that no row is extreme or constant; NaN compares false."""
    spread = var if kind == "layer" else var - mean * mean - NEARLY_CONSTANT * var
    lowest = spread.min(initial=1)
    return bool(
        lowest > TINY
        and var.max(initial=1) < 1 / TINY
        and _is_far_below(mean, 1 / NEARLY_CONSTANT, lowest)
    )


def _is_far_below(values: Float64, times: float, var: np.float64) -> bool:
    """Whether a glance at their square sum shows all values below so many standard deviations.

    The factor 2 is room for roundings: what it shows holds for each row alone as well.
    """
    return bool(2 * (values @ values) < times * times * var)


def _treat_extreme(
    x: Array,
    a: Float64,
    scale: Float64,
    mean: Float64,
    var: Float64,
    norm: Norm,
) -> RowStats:
    """Replace extreme rows of a by their standardized values, and their scale by 1."""
    sd, width = np.sqrt(var), x.shape[1]
    extreme = ~np.isfinite(var + norm.eps) | ~np.isfinite(mean) | (var + norm.eps < TINY)
    if norm.kind == "layer":
        extreme |= ~(sd > NEARLY_CONSTANT * np.abs(mean)) & (mean != 0)
    rstd = scale.copy()
    nonfinite = np.zeros(len(x), np.bool_)
    which = np.flatnonzero(extreme)
    if len(which):
        rows = np.empty((len(which), width))
        widen_into(x[which], rows)
        special = standardize_extreme(rows, norm.kind, norm.eps)
        a[which], scale[which] = rows, 1
        mean[which], var[which], rstd[which] = special.mean, special.var, special.rstd
        nonfinite[which] = special.nonfinite
    return RowStats(mean, var, rstd, _constant(x, mean, var, nonfinite, norm.kind), nonfinite)


def _constant(x: Array, mean: Float64, var: Float64, nonfinite: Bool, kind: str) -> Bool:
    """Which finite rows hold one value only: compared exactly, but only where the spread is near 0."""
    spread_seen = var != 0 if kind == "layer" else var - mean * mean > NEARLY_CONSTANT * var
    constant: Bool = ~(spread_seen | nonfinite)
    which = np.flatnonzero(constant)
    if len(which):
        rows = x[which]
        constant[which] = (rows == rows[:, :1]).all(axis=1)
    return constant


def overflow_counter(norm: Norm, width: int) -> Callable[[Array, RowStats], int]:
    """Return a function that counts the results that are not finite though all they come from is.

    It looks at them only where the parameters let results grow beyond the output's dtype.
    """
    finite = np.ones(width, np.bool_)
    for parameter in (norm.gamma, norm.beta):
        if parameter is not None:
            finite &= np.isfinite(parameter)
    largest = width**0.5 * (1 if norm.gamma is None else float(np.abs(norm.gamma).max()))
    largest += 0 if norm.beta is None else float(np.abs(norm.beta).max())

    def count(y: Array, stats: RowStats) -> int:
        if largest < (6e4 if y.dtype.itemsize == 2 else 400 if y.dtype.itemsize == 1 else 1e38):
            return 0
        return int(np.count_nonzero(~np.isfinite(y[np.isfinite(stats.rstd)][:, finite])))

    return count
