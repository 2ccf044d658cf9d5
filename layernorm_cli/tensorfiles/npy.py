"""The npy format: a strict reader and a writer of its header.

Source: numpy.lib.format, NEP 1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import FormatError
from ..norm.dtypes import DTYPES, DType, numpy_dtype
from .rows import TOO_LARGE, fits_numpy

__all__ = ["NpyHeader", "npy_header", "read_npy_header"]

MAGIC = b"\x93NUMPY"
LARGEST_HEADER = 64 * 1024
FLOATS = "float16, float32, float64, integers or bool"


class NpyHeader(NamedTuple):
    """What an npy header says, and how it stores an element; data_offset is the first byte of data."""

    dtype: DType
    storage: np.dtype[Any]
    fortran_order: bool
    shape: tuple[int, ...]
    data_offset: int


def read_npy_header(read: Callable[[int], bytes], where: str, assume: DType | None = None) -> NpyHeader:
    """Read a header of version 1 to 3; read(n) returns the next n bytes, fewer at the end only.

    assume is what raw elements (V2 as numpy.save writes bfloat16) are taken for.

    Raises FormatError for what is not exactly a header, and for dtypes without a layer norm.
    """
    preamble = read(8)
    if len(preamble) < 8 or not preamble.startswith(MAGIC):
        raise FormatError(where, f"not an npy header: {preamble!r}", f"{MAGIC!r} and a version")
    version = preamble[6]
    if version not in (1, 2, 3):
        raise FormatError(where, f"npy header of version {version}", "version 1, 2 or 3")
    length_size = 2 if version == 1 else 4
    length = int.from_bytes(read(length_size), "little")
    if length > LARGEST_HEADER:
        raise FormatError(where, f"npy header of {length} bytes", f"at most {LARGEST_HEADER}")
    header = read(length)
    if len(header) < length:
        raise FormatError(
            where, f"truncated: {len(header)} bytes of npy header", f"{length} bytes of it"
        )
    encoding = "latin1" if version < 3 else "utf-8"
    descr, fortran_order, shape = _parse_fields(header, where, encoding)
    dtype, storage = _element(descr, where, assume)
    return NpyHeader(dtype, storage, fortran_order and len(shape) > 1, shape, 8 + length_size + length)


def npy_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return a version 1 header for C-ordered little-endian data, padded to 64 bytes as numpy does."""
    fields = f"{{'descr': {numpy_dtype(dtype).str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    length = -(-(10 + len(fields) + 1) // 64) * 64 - 10
    return MAGIC + b"\x01\x00" + length.to_bytes(2, "little") + fields.encode().ljust(length - 1) + b"\n"


def _parse_fields(header: bytes, where: str, encoding: str) -> tuple[object, bool, tuple[int, ...]]:
    """The descr (still to be judged), whether in Fortran order, and the shape."""
    expected = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}"
    fields = _literal(header, encoding)
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        shown = header.strip()[:60].decode("latin1")
        raise FormatError(where, f"malformed npy header: {shown}", expected)
    shape, fortran_order = fields["shape"], fields["fortran_order"]
    if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(where, f"malformed npy header: shape {shape!r}"[:120], expected)
    if not fits_numpy(shape):
        raise FormatError(where, f"npy header with too large a shape: {shape}"[:120], TOO_LARGE)
    if type(fortran_order) is not bool:
        raise FormatError(
            where, f"malformed npy header: fortran_order {fortran_order!r}"[:120], expected
        )
    return fields["descr"], fortran_order, shape


@lru_cache(16)  # many files are alike
def _literal(header: bytes, encoding: str) -> object:
    """What a header says in Python's syntax; None where it is not in that."""
    try:
        text = re.sub(r"(\d)L\b", r"\1", header.decode(encoding))  # Python 2 wrote (3L, 4L)
        fields: object = ast.literal_eval(text.strip())
        repr(fields)  # which fails on numbers of thousands of digits
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return fields


_WHAT = {
    "O": "object arrays are pickles, which layernorm never loads",
    "c": "complex numbers have no layer norm",
    "U": "strings have no layer norm",
    "S": "strings have no layer norm",
    "a": "strings have no layer norm",
    "M": "dates have no layer norm",
    "m": "time differences have no layer norm",
}


def _element(descr: object, where: str, assume: DType | None) -> tuple[DType, np.dtype[Any]]:
    """The dtype and storage that a descr means; numpy cannot be asked, it rejects '<f1' itself."""
    if isinstance(descr, (list, tuple)):
        names = ", ".join(str(field[0]) for field in descr if isinstance(field, tuple) and field)
        raise FormatError(where, f"structured dtype, records with fields {names}"[:200], FLOATS)
    match = re.fullmatch(r"([<>|=]?)([a-zA-Z?])([0-9]{0,9})(\[.{0,30}\])?", str(descr))
    if not isinstance(descr, str) or match is None:
        raise FormatError(where, f"malformed npy header: descr {descr!r}"[:120], "such as '<f4'")
    order, kind, size = match[1], match[2], int(match[3] or 0)
    raw = (kind == "V" and 0 < size <= 2) or (kind, size) == ("f", 1)
    if raw or (kind == "u" and assume is not None and assume.itemsize == size):
        return _raw_element(descr, size, where, assume)
    name = {"f": "float", "i": "int", "u": "uint"}.get(kind, kind)
    dtype = DTYPES.get("bool" if f"{kind}{match[3]}" in ("b1", "?") else f"{name}{8 * size}")
    if dtype is None:
        known = {"O": "object", "c": f"complex{8 * size}"}.get(kind, f"{descr}")
        raise FormatError(
            where, f"dtype {known}: {_WHAT.get(kind, 'not a number that layernorm reads')}", FLOATS
        )
    storage = numpy_dtype(dtype)
    return dtype, storage.newbyteorder(">") if order == ">" and storage.itemsize > 1 else storage


def _raw_element(descr: str, size: int, where: str, assume: DType | None) -> tuple[DType, np.dtype[Any]]:
    if assume is not None and assume.itemsize == size:
        storage = numpy_dtype(assume)
        if not descr.startswith(">") or size == 1:
            return assume, storage
        if assume.in_numpy:
            return assume, storage.newbyteorder(">")
        raise FormatError(where, f"dtype {descr}: big-endian {assume.name}", "little-endian elements")
    likely = "bfloat16" if size == 2 else "float8_e5m2" if descr[-2:] == "f1" else "float8_e4m3fn"
    raise FormatError(
        where,
        f"dtype {descr}: raw bytes, as numpy.save writes bfloat16 and float8",
        FLOATS if assume is None else f"elements of {assume.itemsize} bytes for {assume.name}",
        f"--assume-dtype {likely}",
    )
