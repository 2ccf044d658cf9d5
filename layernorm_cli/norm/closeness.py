"""How near a result must be to count as right: what engines of its dtype reach on rows like these.

An element is made of terms: y = gamma * (x * rstd - mean * rstd) + beta. An engine rounds each of
them, so its error is some units of the dtype's epsilon times the sum of their sizes, however small
their sum is. Measured on torch, onnxruntime and jax, from width 1 to 20,000, on rows of all scales
and means of up to 1e4 standard deviations: at most 2 epsilon where the sums run in pairs, and up to
width / 128 more where they run one after another.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .dtypes import DTYPES, DType, numpy_dtype, output_dtype

__all__ = ["Closeness", "closeness", "epsilon", "ulp"]

Float64 = npt.NDArray[np.float64]

SHORT = 2.0  # epsilons, for 16 and 8 bit: the sums themselves are float32
LONG = 4.0
PER_FEATURE = 1 / 64
SHORT_EPSILON = 2.0**-10  # float16's
EPS_IN_FLOAT32 = 2.0**-25  # some engines keep eps as a float32 number: half its relative error


class Closeness(NamedTuple):
    """Bounds of an error; unit is the epsilon of the coarser of both dtypes, given: they are the user's.

    By default rtol is relative to the sum of an element's terms, the user's is to the element itself.
    """

    rtol: float
    atol: float
    unit: float
    given: bool
    default_rtol: float
    default_atol: float

    def default(self, terms: Float64, of_eps: Float64 | float = 0.0) -> Float64:
        """The bound that engines reach; of_eps is eps / (var + eps) times what is scaled by rstd."""
        bound: Float64 = terms * self.default_rtol + of_eps * EPS_IN_FLOAT32 + self.default_atol
        return bound

    def units(self, errors: Float64, terms: Float64) -> Float64:
        """The errors in epsilons of their terms, those of subnormal numbers in their spacing."""
        return errors / (self.unit * terms + self.default_atol)

    def bound(self, y: Float64, terms: Float64, of_eps: Float64 | float = 0.0) -> Float64:
        """The bound of the error of each element of y."""
        if self.given:
            bound: Float64 = self.atol + self.rtol * np.abs(y)
            return bound
        return self.default(terms, of_eps)


def closeness(
    x: DType, y: DType, width: int, rtol: float | None = None, atol: float | None = None
) -> Closeness:
    """Return the bounds for a result y of rows x; if only one of rtol and atol is given, the other is 0.

    Raises UsageError for bounds that are negative or not finite.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} {value!r}", "not a usable tolerance", "a finite number, 0 or more")
    y = DTYPES["float64"] if y.kind != "f" else y
    dtypes = (y, output_dtype(x))
    unit = max(map(epsilon, dtypes))
    default_rtol = unit * (SHORT if unit >= SHORT_EPSILON else LONG + PER_FEATURE * width)
    default_atol = max(float(ulp(np.zeros(1), dtype)[0]) for dtype in dtypes)
    given = rtol is not None or atol is not None
    return Closeness(
        (rtol or 0.0) if given else default_rtol,
        (atol or 0.0) if given else default_atol,
        unit,
        given,
        default_rtol,
        default_atol,
    )


@cache
def _fraction_bits(dtype: DType) -> tuple[int, int]:
    """Stored fraction bits, and the exponent of the smallest normal number."""
    if not dtype.in_numpy:
        return dtype.mantissa, dtype.min_exponent
    info = np.finfo(numpy_dtype(dtype))
    return int(info.nmant), int(info.minexp)


def epsilon(dtype: DType) -> float:
    """Return the distance from 1 to the next larger number of a floating dtype."""
    return math.ldexp(1.0, -_fraction_bits(dtype)[0])


def ulp(values: Float64, dtype: DType) -> Float64:
    """Return the distance between neighbours of a floating dtype at values (any shape, float64).

    >>> float(ulp(np.array([1.5]), DTYPES["bfloat16"])[0])
    0.0078125
    """
    bits, least = _fraction_bits(dtype)
    exponent = np.frexp(values)[1] - 1
    exponent = np.where(values == 0, least, np.maximum(exponent, least))
    spacing: Float64 = np.ldexp(1.0, exponent - bits)
    return spacing
