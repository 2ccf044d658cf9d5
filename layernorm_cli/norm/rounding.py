"""Widening into float64 (exact) and the one rounding out of it (to nearest, ties to even)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from .dtypes import DTYPES, DType

__all__ = ["round_into", "rounding", "widen_into", "widening"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]


@cache
def _name(dtype: np.dtype[np.generic]) -> str:
    """numpy composes the name anew at each look, which takes as long as rounding a thousand numbers."""
    return dtype.name


@cache
def _byte_values(dtype: np.dtype[np.generic]) -> Float64:
    """The float64 value of each of the 256 bytes of a float8 dtype."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)


def widen_into(x: Array, out: Float64) -> None:
    """Copy x (any real dtype) into out (float64, same shape); exact for every float and up to 2**53."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        widening(x.dtype)(x, out)


def widening(dtype: np.dtype[np.generic]) -> Callable[[Array, Float64], object]:
    """Return what widen_into does for a dtype, for where numpy's warnings are off anyway."""
    if _name(dtype).startswith("float8"):  # a table is ten times faster than ml_dtypes' own cast
        values = _byte_values(dtype)
        return lambda x, out: np.take(values, x.view(np.uint8), out=out)
    return _cast


def round_into(y: Float64, out: Array) -> None:
    """Round y (float64) once into out (a floating dtype, same shape), to nearest even; y is overwritten.

    numpy rounds float64 to float32 and float16 directly. ml_dtypes goes through float32, which
    rounds twice (1 + 2**-8 + 2**-40 becomes 1 in bfloat16); so y is first moved onto the target's
    grid, where that cast is exact.
    """
    with np.errstate(all="ignore"):  # what does not fit becomes inf
        rounding(out.dtype)(y, out)


def rounding(dtype: np.dtype[np.generic]) -> Callable[[Float64, Array], object]:
    """Return what round_into does for a dtype, for where numpy's warnings are off anyway."""
    target = DTYPES[_name(dtype)]
    if target.in_numpy:
        return _cast

    def round_(y: Float64, out: Array) -> None:
        _onto_grid(y, target)
        _cast(y, out)

    return round_


def _cast(x: Array, out: Array) -> None:
    np.copyto(out, x, casting="unsafe")


def _onto_grid(y: Float64, dtype: DType) -> None:
    subnormal = np.abs(y) < 2.0**dtype.min_exponent
    tiny = y[subnormal]
    drop = np.uint64(52 - dtype.mantissa)
    one = np.uint64(1)
    bits = y.view(np.uint64)
    odd = (bits >> drop) & one
    rounded = bits + ((one << (drop - one)) - one) + odd
    rounded &= ~((one << drop) - one)
    np.copyto(bits, rounded, where=np.isfinite(y))
    step = dtype.min_exponent - dtype.mantissa
    y[subnormal] = np.ldexp(np.rint(np.ldexp(tiny, -step)), step)
