"""Element types by name: which exist, how wide they are, what safetensors calls them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

__all__ = [
    "DTYPES",
    "DType",
    "float_dtype",
    "numpy_dtype",
    "output_dtype",
]


class DType(NamedTuple):
    """An element type that layernorm computes with.

    mantissa and min_exponent describe the floats that numpy lacks: stored fraction bits, and the
    exponent of the smallest normal number.
    """

    name: str
    code: str
    itemsize: int
    kind: str  # numpy's letter: b(ool), u(nsigned), i(nteger), f(loat)
    aliases: tuple[str, ...] = ()
    mantissa: int = 0
    min_exponent: int = 0

    @property
    def in_numpy(self) -> bool:
        """Whether numpy, and with it the npy format, has this type."""
        return self.mantissa == 0


_TABLE = (
    DType("float64", "F64", 8, "f", ("double", "fp64")),
    DType("float32", "F32", 4, "f", ("float", "single", "fp32")),
    DType("float16", "F16", 2, "f", ("half", "fp16")),
    DType("bfloat16", "BF16", 2, "f", (), 7, -126),
    DType("float8_e4m3fn", "F8_E4M3", 1, "f", ("float8_e4m3", "e4m3"), 3, -6),
    DType("float8_e5m2", "F8_E5M2", 1, "f", ("e5m2",), 2, -14),
    DType("int64", "I64", 8, "i"),
    DType("int32", "I32", 4, "i"),
    DType("int16", "I16", 2, "i"),
    DType("int8", "I8", 1, "i"),
    DType("uint64", "U64", 8, "u"),
    DType("uint32", "U32", 4, "u"),
    DType("uint16", "U16", 2, "u"),
    DType("uint8", "U8", 1, "u"),
    DType("bool", "BOOL", 1, "b"),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}


def float_dtype(text: str) -> DType:
    """Return the floating dtype meant by text: numpy's name, safetensors' code, or an alias.

    Raises UsageError where it is none of them.

    >>> float_dtype("BF16").name
    'bfloat16'
    """
    floats = [dtype for dtype in _TABLE if dtype.kind == "f"]
    for dtype in floats:
        if text.lower() in (dtype.name, dtype.code.lower(), *dtype.aliases):
            return dtype
    raise UsageError(
        f"dtype {text!r}", "not a floating dtype", ", ".join(dtype.name for dtype in floats)
    )


@cache
def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's little-endian dtype; ml_dtypes is imported for bfloat16 and float8 only."""
    if dtype.in_numpy:
        return np.dtype(dtype.name).newbyteorder("<")
    import ml_dtypes

    wanted: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return wanted


def output_dtype(dtype: DType) -> DType:
    """Return the dtype that the output has by default.

    A floating input's own, float64 for integers and bool, bfloat16 for float8.
    """
    if dtype.kind != "f":
        return DTYPES["float64"]
    return DTYPES["bfloat16"] if dtype.itemsize == 1 else dtype


def dtype_of(array: npt.NDArray[np.generic]) -> DType:
    """Return the table's entry for an array's dtype; Raises UsageError naming a dtype not in it."""
    found = DTYPES.get(array.dtype.name)
    if found is None:
        raise UsageError("", f"arrays of dtype {array.dtype} have no layer norm", ", ".join(DTYPES))
    return found
