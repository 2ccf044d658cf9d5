"""What the engines of other packages have in common: they normalize, the statistics are numpy's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..norm.backward import BackwardKernel, by_segments, close_rows, finite_rows
from ..norm.forward import Kernel, RowStats, overflow_counter, row_kernel
from ..norm.rounding import round_into, widen_into
from ..norm.spec import Norm

__all__ = ["foreign_backward_kernel", "foreign_kernel", "parameters"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]


def foreign_kernel(norm: Norm, width: int, run: Callable[[Array], Array]) -> Kernel:
    """Return a kernel around run, which takes x (r, d) float and returns y (r, d), rounded as it does.

    Integers are widened to float64 first. Where another dtype of y is asked for, it is rounded into.
    """
    statistics = row_kernel(Norm(norm.kind, norm.eps), width)
    count_overflow = overflow_counter(norm, width)

    def kernel(x: Array, y: Array | None) -> RowStats:
        stats = statistics(x, None)
        if y is None or len(x) == 0:
            return stats
        result = run(np.ascontiguousarray(x, _native(x)))
        if result.dtype == y.dtype:
            np.copyto(y, result)
        else:
            wide = np.empty(result.shape)
            widen_into(result, wide)
            round_into(wide, y)
        return stats._replace(overflow=count_overflow(y, stats))

    return kernel


def foreign_backward_kernel(
    norm: Norm, width: int, run: Callable[[Array, Array], tuple[Array, Array, Array]]
) -> BackwardKernel:
    """Return a backward kernel around run, which takes x and dy (r, d) of one dtype.

    run returns dx (r, d), dgamma and dbeta (d,), rounded as it does. dy is rounded to x's dtype first.
    """
    statistics = row_kernel(Norm(norm.kind, norm.eps), width)

    def segment(x: Array, dy: Array, dx: Array | None) -> tuple[RowStats, Float64, Float64]:
        stats = statistics(x, None)
        if len(x) == 0:
            return stats, np.zeros(width), np.zeros(width)
        wide = np.empty(x.shape)
        widen_into(dy, wide)
        finite = finite_rows(wide, wide.sum(axis=1))
        upstream = np.empty(x.shape, _native(x))
        round_into(wide, upstream)
        found = run(np.ascontiguousarray(x, _native(x)), upstream)
        widen_into(found[0], wide)
        sums = np.empty((2, width))
        widen_into(found[1], sums[0])
        widen_into(found[2], sums[1])
        return close_rows(stats, finite, wide, dx), sums[0], sums[1]

    return by_segments(segment, width)


def _native(x: Array) -> np.dtype[np.generic]:
    """The dtype that other packages take x in."""
    return x.dtype.newbyteorder("=") if x.dtype.kind in "fV" else np.dtype(np.float64)


def parameters(norm: Norm, width: int, dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """Return gamma and beta (d,) in an engine's dtype, 1 and 0 where there are none."""
    gamma = np.ones(width) if norm.gamma is None else norm.gamma
    beta = np.zeros(width) if norm.beta is None else norm.beta
    return gamma.astype(dtype), beta.astype(dtype)
