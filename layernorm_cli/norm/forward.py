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
from .rounding import round_into, rounding, widen_into, widening
from .spec import Norm
from .sums import row_dots, work_space

__all__ = ["Kernel", "RowStats", "concatenate", "overflow_counter", "row_kernel"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Floating = npt.NDArray[np.floating]
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
    root_width, width_eps = np.sqrt(np.longdouble(width)), np.longdouble(width) * norm.eps
    dot, squares_dot = row_dots(work)

    def centre(a: Float64) -> tuple[Floating, Floating]:
        """Take the mean out of the rows of a, for a layer norm, and return it and width * var."""
        mean = dot(a, ones) / width
        if norm.kind != "layer":
            return mean, squares_dot(a, a)
        a -= mean[:, None]
        residual = dot(a, ones) / width
        squares = squares_dot(a, a)
        size = np.abs(residual)
        if not np.maximum.reduce(size) <= VISIBLE * np.sqrt(np.float64(squares.min()) / width):  # or NaN
            residual[size <= VISIBLE * np.sqrt(squares.astype(np.float64) / width)] = 0
            if residual.any():
                a -= residual[:, None]
                mean -= 0 - residual  # a mean of -0.0 stays, as it does where no residual is added
                squares -= residual * residual * width
        return mean, squares

    def kernel(x: Array, y: Array | None) -> RowStats:
        mean, var, rstd = np.empty((3, len(x)))
        with np.errstate(all="ignore"):
            np.setbufsize(UFUNC_BUFFER)  # until errstate ends
            widen, round_ = widening(x.dtype), rounding(mean.dtype if y is None else y.dtype)
            for start in range(0, len(x), rows_per_tile):
                tile = slice(start, start + rows_per_tile)
                a, scale = work[: len(x) - start], rstd[tile]
                widen(x[tile], a)
                mean[tile], squares = centre(a)
                var[tile] = squares
                np.divide(root_width, np.sqrt(squares + width_eps), out=scale, casting="same_kind")
                if y is not None:
                    a *= scale[:, None]
                    _scale_and_shift(a, norm)
                    round_(a, y[tile])
            var /= width
            stats = RowStats(mean, var, rstd, *np.zeros((2, len(x)), np.bool_))
            if not _is_calm(mean, var, norm.kind):
                _treat_extreme(x, y, stats, norm, rows_per_tile)
        return stats if y is None else stats._replace(overflow=count_overflow(y, stats))

    return kernel


def _scale_and_shift(a: Float64, norm: Norm) -> None:
    if norm.gamma is not None:
        a *= norm.gamma
    if norm.beta is not None:
        a += norm.beta


def _is_calm(mean: Float64, var: Float64, kind: str) -> bool:
    """Whether a glance shows that no row is extreme or constant; NaN compares false."""
    spread = var if kind == "layer" else var - mean * mean - NEARLY_CONSTANT * var
    lowest = spread.min(initial=1)
    return bool(
        lowest > TINY
        and var.max(initial=1) < 1 / TINY
        and np.abs(mean).max(initial=0) * NEARLY_CONSTANT < np.sqrt(lowest)
    )


def _treat_extreme(x: Array, y: Array | None, stats: RowStats, norm: Norm, at_once: int) -> None:
    """Do the extreme rows of x again, with care, and mark the constant ones; so many rows at once."""
    for which in _tiles(_is_extreme(stats.mean, stats.var, norm), at_once):
        a = np.empty((len(which), x.shape[1]))
        widen_into(x[which], a)
        special = standardize_extreme(a, norm.kind, norm.eps)
        columns = (stats.mean, stats.var, stats.rstd, stats.nonfinite)
        for column, values in zip(columns, special, strict=True):
            column[which] = values
        if y is not None:
            rows = np.empty(a.shape, y.dtype)
            _scale_and_shift(a, norm)
            round_into(a, rows)
            y[which] = rows
    for which in _tiles(_may_be_constant(stats, norm.kind), at_once):
        rows = x[which]
        stats.constant[which] = (rows == rows[:, :1]).all(axis=1)


def _tiles(chosen: Bool, size: int) -> list[npt.NDArray[np.intp]]:
    """The places of the rows chosen, so many at a time."""
    places = np.flatnonzero(chosen)
    return [places[start : start + size] for start in range(0, len(places), size)]


def _is_extreme(mean: Float64, var: Float64, norm: Norm) -> Bool:
    extreme: Bool = ~np.isfinite(var + norm.eps) | ~np.isfinite(mean) | (var + norm.eps < TINY)
    if norm.kind == "layer":
        extreme |= ~(np.sqrt(var) > NEARLY_CONSTANT * np.abs(mean)) & (mean != 0)
    return extreme


def _may_be_constant(stats: RowStats, kind: str) -> Bool:
    """Which finite rows have a spread so near to 0 that only comparing them tells."""
    mean, var = stats.mean, stats.var
    spread_seen = var != 0 if kind == "layer" else var - mean * mean > NEARLY_CONSTANT * var
    doubtful: Bool = ~(spread_seen | stats.nonfinite)
    return doubtful


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
