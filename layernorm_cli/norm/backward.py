"""The backward pass over blocks of rows: float64 inside, the same bits whatever the blocks are.

With g = dy * gamma and the means taken along a row,

    dx     = rstd * (g - mean(g) - xhat * mean(g * xhat))        without mean(g) for rms norms
    dgamma = sum over rows of dy * xhat
    dbeta  = sum over rows of dy

The sums over rows are taken segment by segment, whose length depends on the width alone, and the
segments' sums are added in their order with what each addition rounds off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .arrays import normalized_axis
from .dtypes import dtype_of
from .forward import RowStats, concatenate, row_kernel
from .rounding import round_into, widen_into
from .spec import DEFAULT_EPS, Norm, make_norm
from .sums import add_exactly, row_dots, sum_rows, work_space

__all__ = [
    "BackwardKernel",
    "Gradients",
    "ParameterSums",
    "RowGradients",
    "Segment",
    "backward_kernel",
    "by_segments",
    "close_rows",
    "finite_rows",
    "layer_norm_backward",
    "segment_rows",
]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

SEGMENT_ELEMENTS = 48 * 1024  # of x, dy and dx each: together they stay in a core's own cache


class Gradients(NamedTuple):
    """The gradients, float64: dx of x's shape, dgamma and dbeta of the shape of its normalized axes."""

    dx: Float64
    dgamma: Float64
    dbeta: Float64


class RowGradients(NamedTuple):
    """What r rows give: their statistics, and dgamma and dbeta (s, d) float64 of each of s segments.

    In the statistics, nonfinite rows are those with a NaN or an inf in x or dy, and overflow counts
    the finite results that do not fit dx's dtype.
    """

    stats: RowStats
    dgamma: Float64
    dbeta: Float64


BackwardKernel = Callable[[Array, Array, Array | None], RowGradients]
"""kernel(x, dy, dx) writes dx (r, d), rounded once, from x and dy (r, d), any real dtypes; for dx None
it only returns the sums. The rows start where a segment does."""

Segment = Callable[[Array, Array, Array | None], tuple[RowStats, Float64, Float64]]
"""segment(x, dy, dx) does the rows of one segment: it returns their statistics, dgamma, dbeta (d,)."""


class ParameterSums(NamedTuple):
    """A gradient summed over rows, (d,) float64, and what the additions so far have rounded off."""

    total: Float64
    lost: Float64

    @classmethod
    def zero(cls, width: int) -> ParameterSums:
        """Return the sum of no rows."""
        return cls(np.zeros(width), np.zeros(width))

    def add(self, parts: Iterable[Float64]) -> None:
        """Add the sums (d,) of the next segments."""
        for part in parts:
            add_exactly(self.total, self.lost, part)

    def value(self) -> Float64:
        """Return the sum, rounded once; where it is infinite or NaN, what was lost means nothing."""
        with np.errstate(all="ignore"):
            return np.where(np.isfinite(self.total), self.total + self.lost, self.total)


def segment_rows(width: int) -> int:
    """Return how many rows of that width are summed before compensation: a matter of the width alone."""
    return max(1, min(SEGMENT_ELEMENTS // width, 4096))


def layer_norm_backward(
    x: npt.ArrayLike,
    dy: npt.ArrayLike,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    eps: float = DEFAULT_EPS,
    axis: int = -1,
    *,
    kind: str = "layer",
    gamma_offset: float = 0,
) -> Gradients:
    """Differentiate layer_norm: return the gradients for x, gamma and beta from dy, that for the output.

    x and dy: (..., d), any real dtypes; gamma, beta: shape x.shape[axis:], or None for 1 and 0 (beta has
    no influence, and is taken so that the arguments are those of layer_norm). All is float64:
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * (gamma + gamma_offset), dgamma the
    sum of dy * xhat and dbeta that of dy over the rows, summed with compensation. kind "rms" leaves out
    mean(g). A row with a NaN or an inf in x or dy has NaN in all its dx.

    Raises UsageError for shapes, dtypes or an eps that cannot be used.

    Sources: the derivative of the formula above; torch.ops.aten.native_layer_norm_backward.

    >>> layer_norm_backward([2, 6, -2, 4], [1, 0, 0, 0], eps=0).dx.round(4)
    array([ 0.2511, -0.0676, -0.1062, -0.0773])
    """
    array, upstream = np.asarray(x), np.asarray(dy)
    dtype_of(array)
    dtype_of(upstream)
    axis = normalized_axis(array.shape, axis)
    if upstream.shape != array.shape:
        raise UsageError("dy", f"has shape {upstream.shape}", f"x's shape {array.shape}")
    norm = make_norm(kind, eps, gamma, beta, gamma_offset, array.shape[axis:])
    dx = np.empty(array.shape)
    width = math.prod(array.shape[axis:])
    rows = (values.reshape(-1, width) for values in (array, upstream, dx))
    found = backward_kernel(norm, width)(*rows)
    dgamma, dbeta = ParameterSums.zero(width), ParameterSums.zero(width)
    dgamma.add(found.dgamma)
    dbeta.add(found.dbeta)
    return Gradients(dx, *(total.value().reshape(array.shape[axis:]) for total in (dgamma, dbeta)))


def backward_kernel(norm: Norm, width: int) -> BackwardKernel:
    """Return a kernel for rows of that width; it owns its work space, so each thread needs its own."""
    rows = segment_rows(width)
    standardize = row_kernel(Norm(norm.kind, norm.eps), width)
    xhat_work, work = work_space(rows, width), work_space(rows, width)
    dot, _ = row_dots(work)
    ones = np.ones(width)

    def segment(x: Array, dy: Array, dx: Array | None) -> tuple[RowStats, Float64, Float64]:
        xhat, g = xhat_work[: len(x)], work[: len(x)]
        stats = standardize(x, xhat)
        widen_into(dy, g)
        dbeta, dgamma = sum_rows(g.T), sum_rows((g * xhat).T)
        finite = finite_rows(g, dot(g, ones))
        if dx is not None:
            if norm.gamma is not None:
                g *= norm.gamma
            if norm.kind == "layer":
                g -= (dot(g, ones) / width)[:, None]
            xhat *= (dot(g, xhat) / width)[:, None]
            g -= xhat
            g *= stats.rstd[:, None]
        return close_rows(stats, finite, g, dx), dgamma, dbeta

    return by_segments(segment, width)


def by_segments(segment: Segment, width: int) -> BackwardKernel:
    """Return a kernel for blocks of rows around a function for the rows of one segment."""
    size = segment_rows(width)

    def kernel(x: Array, dy: Array, dx: Array | None) -> RowGradients:
        tiles = [slice(at, at + size) for at in range(0, max(len(x), 1), size)]
        with np.errstate(all="ignore"):
            parts = [segment(x[tile], dy[tile], None if dx is None else dx[tile]) for tile in tiles]
        stats, dgamma, dbeta = zip(*parts, strict=True)
        return RowGradients(concatenate(list(stats)), np.stack(dgamma), np.stack(dbeta))

    return kernel


def finite_rows(rows: Float64, sums: npt.NDArray[np.floating]) -> Bool:
    """Return which rows (r, d) are all finite, given any sums along them, which nearly always tell."""
    finite: Bool = np.isfinite(sums)
    doubtful = np.flatnonzero(~finite)
    finite[doubtful] = np.isfinite(rows[doubtful]).all(axis=1)
    return finite


def close_rows(stats: RowStats, finite: Bool, wide: Float64, dx: Array | None) -> RowStats:
    """Round wide into dx, all NaN where x or dy are not finite, and return the statistics of that.

    finite says where dy is; wide (r, d) float64 is overwritten.
    """
    nonfinite = stats.nonfinite | ~finite
    overflow = 0
    if dx is not None:
        wide[nonfinite] = np.nan
        round_into(wide, dx)
        fits = np.isfinite(dx)
        if not fits.all():
            overflow = int(np.count_nonzero(np.isfinite(wide) & ~fits))
    return stats._replace(nonfinite=nonfinite, overflow=overflow)
