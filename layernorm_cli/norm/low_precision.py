"""A norm whose every step is rounded to a shorter dtype: does eps survive, is var in range."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .dtypes import DType, numpy_dtype
from .rounding import round_into
from .spec import Norm
from .sums import sum_rows

__all__ = ["InDType", "norm_in_dtype"]

Float64 = npt.NDArray[np.float64]
Short = npt.NDArray[Any]  # of the shorter dtype


class InDType(NamedTuple):
    """A row's norm computed in a dtype.

    var and eps are as they are there. eps_survives: eps is not 0 there, and var + eps is not var.
    var_overflows: var is no finite number though all of x is; var_underflows: it is 0 though x is not
    constant. max_abs_error: of y, against the float64 result.
    """

    dtype: str
    max_abs_error: float
    eps_survives: bool
    eps: float
    var: float
    var_overflows: bool
    var_underflows: bool


def norm_in_dtype(x: Float64, norm: Norm, y: Float64, dtype: DType) -> InDType:
    """Compute the norm of one row x (d,) in dtype, each result rounded to it, and compare with y (d,).

    Sums are pairwise, as in numpy and on GPUs; each addition is rounded too.
    """
    target, width = numpy_dtype(dtype), x.size

    def rounded(values: npt.ArrayLike) -> Short:
        wide = np.array(values, dtype=np.float64).reshape(-1)
        out = np.empty(wide.shape, target)
        round_into(wide, out)
        return out

    def mean_of(values: Short) -> Short:
        total: Short = sum_rows(values[None])
        return rounded(total.astype(np.float64) / width)

    with np.errstate(all="ignore"):
        centred = rounded(x)
        if norm.kind == "layer":
            centred = centred - mean_of(centred)
        var, eps = mean_of(centred * centred), rounded(norm.eps)
        below = var + eps
        result = centred / np.sqrt(below)
        if norm.gamma is not None:
            result = result * rounded(norm.gamma)
        if norm.beta is not None:
            result = result + rounded(norm.beta)
        error = np.abs(result.astype(np.float64) - y).max()
        in_range = bool(np.isfinite(var[0]))
        varies = (x != x[0]).any() if norm.kind == "layer" else x.any()
        return InDType(
            dtype=dtype.name,
            max_abs_error=float(error),
            eps_survives=in_range and bool(eps[0] > 0 and below[0] != var[0]),
            eps=float(eps[0]),
            var=float(var[0]),
            var_overflows=not in_range and bool(np.isfinite(x).all()),
            var_underflows=bool(var[0] == 0 and varies),
        )
