"""The forward pass over blocks of rows: float64 inside, the same bits for a row wherever it stands.

Every sum runs along one row in an order that depends on the width alone, so neither the rows around
it nor the size of the block can change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .extreme import standardize_extreme
from .rounding import round_into, widen_into
from .spec import Norm

__all__ = ["Kernel", "RowStats", "concatenate", "row_kernel"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

TILE_ELEMENTS = 96 * 1024  # three quarters of a megabyte of float64: it stays in a core's own cache
SEGMENT = 1024  # BLAS may split longer dot products over threads, and their error grows with length
NARROW = 32  # below this width the loops run down the columns instead of along the rows
VISIBLE = 2.0**-54  # a residual mean below this many standard deviations changes no result
NEARLY_CONSTANT = 2.0**-44  # a spread this small against the mean may be the mean's own rounding
TINY = 1e-280  # squares of smaller numbers lose digits to underflow


@dataclass(frozen=True)
class RowStats:
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
"""kernel(x, y): normalizes x (r, d), any real dtype, into y (r, d), rounded once; y None: statistics only."""


def concatenate(parts: list[RowStats]) -> RowStats:
    """Return the statistics of consecutive blocks of rows as one record."""
    if len(parts) == 1:
        return parts[0]
    return RowStats(
        *(
            np.concatenate([getattr(part, field) for part in parts])
            for field in ("mean", "var", "rstd", "constant", "nonfinite")
        ),
        overflow=sum(part.overflow for part in parts),
    )


def row_kernel(norm: Norm, width: int) -> Kernel:
    """Return a kernel for rows of that width; it owns its work space, so each thread needs its own."""
    rows_per_tile = max(1, min(TILE_ELEMENTS // width, 8192))
    work = _work_space(rows_per_tile, width)
    gamma = _repeat(norm.gamma, work)
    beta = _repeat(norm.beta, work)
    dot = _narrow_dot(work) if width < NARROW else _wide_dot(width)
    ones = np.ones(width)

    def tile_kernel(x: Array, y: Array | None) -> RowStats:
        a = work[: len(x)]
        widen_into(x, a)
        mean = dot(a, ones) / width
        if norm.kind == "layer":
            a -= mean[:, None]
            var = dot(a, a) / width
            sd = np.sqrt(var)
            residual = dot(a, ones) / width
            residual[np.abs(residual) <= VISIBLE * sd] = 0
            if residual.any():
                a -= residual[:, None]
                mean += residual
                var -= residual * residual
            extreme = (sd <= NEARLY_CONSTANT * np.abs(mean)) & (mean != 0)
            extreme |= np.abs(residual) > 2.0**-5 * sd
        else:
            var = dot(a, a) / width
            extreme = np.zeros(len(x), np.bool_)
        scale = var + norm.eps
        extreme |= ~np.isfinite(scale) | ~np.isfinite(mean) | (scale < TINY)
        scale = 1 / np.sqrt(scale)
        rstd = scale
        nonfinite = np.zeros(len(x), np.bool_)
        if extreme.any():
            which = np.flatnonzero(extreme)
            rows = np.empty((len(which), width))
            widen_into(x[which], rows)
            special = standardize_extreme(rows, norm.kind, norm.eps)
            a[which], scale[which] = rows, 1
            rstd = scale.copy()
            mean[which], var[which], rstd[which] = special.mean, special.var, special.rstd
            nonfinite[which] = special.nonfinite
        overflow = 0
        if y is not None:
            a *= scale[:, None]
            if gamma is not None:
                a *= gamma[: len(x)]
            if beta is not None:
                a += beta[: len(x)]
            round_into(a, y)
            overflow = _count_overflow(y, nonfinite) if may_overflow(y) else 0
        return RowStats(mean, var, rstd, _constant(x, mean, var, norm.kind), nonfinite, overflow)

    largest = width**0.5 * (1 if norm.gamma is None else float(np.abs(norm.gamma).max()))
    largest += 0 if norm.beta is None else float(np.abs(norm.beta).max())

    def may_overflow(y: Array) -> bool:
        return not largest < (6e4 if y.dtype.itemsize == 2 else 400 if y.dtype.itemsize == 1 else 1e38)

    def kernel(x: Array, y: Array | None) -> RowStats:
        parts = []
        with np.errstate(all="ignore"):
            for start in range(0, len(x), rows_per_tile):
                tile = slice(start, start + rows_per_tile)
                parts.append(tile_kernel(x[tile], None if y is None else y[tile]))
        return concatenate(parts) if parts else tile_kernel(x, y)

    return kernel


def _work_space(rows: int, width: int) -> Float64:
    """An empty (rows, width) float64 array in the layout that the width is fastest in.

    Wide rows each start on a cache line, since a BLAS may add in another order off one.
    """
    if width < NARROW:
        return np.empty((width, rows)).T
    stride = -(-width // 8) * 8
    memory = np.empty(rows * stride + 8)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + rows * stride].reshape(rows, stride)[:, :width]


def _repeat(parameter: Float64 | None, like: Float64) -> Float64 | None:
    """The parameter on every row of a tile: numpy works faster on equal shapes than by broadcasting."""
    if parameter is None:
        return None
    repeated = np.empty_like(like)
    repeated[...] = parameter
    return repeated


def _wide_dot(width: int) -> Callable[[Float64, Float64], Float64]:
    """Dot products along rows, in segments whose sums are then added in pairs."""
    starts = range(0, width, SEGMENT)

    def dot(a: Float64, b: Float64) -> Float64:
        sums = [
            np.vecdot(a[:, start : start + SEGMENT], b[..., start : start + SEGMENT])
            for start in starts
        ]
        while len(sums) > 1:
            pairs = [left + right for left, right in zip(sums[::2], sums[1::2], strict=False)]
            sums = pairs + sums[len(sums) & ~1 :]
        return sums[0]

    return dot


def _narrow_dot(like: Float64) -> Callable[[Float64, Float64], Float64]:
    """Dot products of many short rows, one column after the other."""
    products = np.empty_like(like)

    def dot(a: Float64, b: Float64) -> Float64:
        product = products[: len(a)]
        np.multiply(a, b, out=product)
        total = product[:, 0].copy()
        for column in product.T[1:]:
            total += column
        return total

    return dot


def _constant(x: Array, mean: Float64, var: Float64, kind: str) -> Bool:
    """Which rows hold one value only; exact, and looked at closely only where the spread is almost 0."""
    spread = var if kind == "layer" else var - mean * mean
    constant: Bool = spread <= NEARLY_CONSTANT**2 * var
    which = np.flatnonzero(constant)
    if len(which):
        rows = x[which]
        constant[which] = (rows == rows[:, :1]).all(axis=1)
    return constant


def _count_overflow(y: Array, nonfinite: Bool) -> int:
    return int(np.count_nonzero(~np.isfinite(y[~nonfinite])))
