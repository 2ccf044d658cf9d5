"""Rows at the edges of float64: squares that overflow or vanish, constant rows, NaN and inf."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .sums import sum_rows

__all__ = ["standardize_extreme"]

Float64 = npt.NDArray[np.float64]


class ExtremeStats(NamedTuple):
    """mean, var, rstd (k,) float64, and which of the k rows hold a NaN or an inf."""

    mean: Float64
    var: Float64
    rstd: Float64
    nonfinite: npt.NDArray[np.bool_]


def standardize_extreme(x: Float64, kind: str, eps: float) -> ExtremeStats:
    """Replace x (k, d) float64 by its standardized rows, and return their statistics.

    Each row is scaled by a power of two, which is exact, so that its squares neither overflow nor
    vanish. A constant row becomes exactly 0 (NaN where eps is 0), a row with a NaN or an inf all NaN.
    """
    width = x.shape[1]
    nonfinite = np.asarray(~np.isfinite(x).all(axis=1))
    first = x[:, 0].copy()
    constant = (x == x[:, :1]).all(axis=1)
    if kind != "layer":
        constant[:] = False
    naive_mean = x.sum(axis=1) / width
    x[nonfinite] = 0
    exponent = np.frexp(np.abs(x).max(axis=1))[1]
    if eps > 0:  # which must not overflow when it is scaled along
        exponent = np.maximum(exponent, -((1024 - np.frexp(eps)[1]) // 2))
    np.ldexp(x, -exponent[:, None], out=x)
    mean = sum_rows(x) / width
    if kind == "layer":
        x -= mean[:, None]
        for _ in range(2):
            residual = sum_rows(x) / width
            x -= residual[:, None]
            mean += residual
        x[constant] = 0
    var = sum_rows(x * x) / width
    rstd = 1 / np.sqrt(var + np.ldexp(eps, -2 * exponent))
    x *= np.where(constant & (eps > 0), 0.0, rstd)[:, None]
    x[nonfinite] = np.nan
    mean = np.where(constant, first, np.ldexp(mean, exponent))
    var = np.where(constant, 0.0, np.ldexp(var, 2 * exponent))
    rstd = np.where(constant, 1 / np.sqrt(np.float64(eps)), np.ldexp(rstd, -exponent))
    mean[nonfinite] = naive_mean[nonfinite]
    var[nonfinite] = rstd[nonfinite] = np.nan
    return ExtremeStats(mean, var, rstd, nonfinite)
