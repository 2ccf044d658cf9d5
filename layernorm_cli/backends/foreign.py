"""What the engines of other packages have in common: they normalize, the statistics are numpy's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..norm.forward import Kernel, RowStats, overflow_counter, row_kernel
from ..norm.rounding import round_into, widen_into
from ..norm.spec import Norm

__all__ = ["foreign_kernel", "parameters"]

Array = npt.NDArray[np.generic]


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
        native = x.dtype.newbyteorder("=") if x.dtype.kind in "fV" else np.dtype(np.float64)
        result = run(np.ascontiguousarray(x, native))
        if result.dtype == y.dtype:
            np.copyto(y, result)
        else:
            wide = np.empty(result.shape)
            widen_into(result, wide)
            round_into(wide, y)
        return stats._replace(overflow=count_overflow(y, stats))

    return kernel


def parameters(norm: Norm, width: int, dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """Return gamma and beta (d,) in an engine's dtype, 1 and 0 where there are none."""
    gamma = np.ones(width) if norm.gamma is None else norm.gamma
    beta = np.zeros(width) if norm.beta is None else norm.beta
    return gamma.astype(dtype), beta.astype(dtype)
