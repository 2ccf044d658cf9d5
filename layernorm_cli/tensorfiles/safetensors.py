"""The safetensors format: a strict reader and a writer of its header.

Source: the safetensors format description (8-byte length, JSON, data without holes).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import FormatError
from ..norm.dtypes import DTYPES, DType
from .rows import TOO_LARGE, fits_numpy

__all__ = ["SafetensorsEntry", "SafetensorsHeader", "read_safetensors_header", "safetensors_header"]

LARGEST_HEADER = 100_000_000  # the safetensors library's own limit
METADATA = "__metadata__"

# Bits of an element, for the size check; types outside layernorm's own table included.
_BITS = {dtype.code: 8 * dtype.itemsize for dtype in DTYPES.values()} | {
    "C64": 64,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


class SafetensorsEntry(NamedTuple):
    """One tensor of a header: its dtype as the file calls it, its shape, where its bytes are."""

    code: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsHeader(NamedTuple):
    """The tensors of a file in the order of its header, its metadata, and what is odd but harmless."""

    entries: dict[str, SafetensorsEntry]
    metadata: dict[str, str]
    warnings: tuple[str, ...] = ()


class _DuplicateKey(ValueError):
    pass


def read_safetensors_header(length: bytes, size: int, header: bytes, where: str) -> SafetensorsHeader:
    """Parse a header: the file's first 8 bytes, its size, and as many bytes behind them as they say.

    Raises FormatError that says what is wrong and where: length, JSON, a duplicate key, an entry, an
    overlap, a hole, missing or surplus bytes.
    """
    count = header_length(length, size, where)
    fields = _parse_json(header, where)
    metadata, warnings = _parse_metadata(fields.pop(METADATA, {}), where)
    begin = 8 + count
    spans = []
    entries = {}
    for name, field in fields.items():
        code, shape, start, stop = _parse_entry(name, field, where)
        entries[name] = SafetensorsEntry(code, shape, begin + start, stop - start)
        spans.append((start, stop, name))
    _check_cover(spans, size - begin, where)
    return SafetensorsHeader(entries, metadata, warnings)


def header_length(length: bytes, size: int, where: str) -> int:
    """Return the header's length in bytes; Raises FormatError where it cannot be."""
    if len(length) < 8:
        raise FormatError(
            where,
            f"truncated or incomplete: {size} bytes",
            "8 bytes of header length, then the header",
        )
    count = int.from_bytes(length, "little")
    if count == 0:
        raise FormatError(
            where,
            f"safetensors header length 0, in a file of {size} bytes",
            "a header of at least 2 bytes",
            "fetching it again; it looks incomplete, or reserved and never filled",
        )
    if count > LARGEST_HEADER:
        raise FormatError(
            where,
            f"safetensors header length {count}, in a file of {size} bytes",
            f"at most {LARGEST_HEADER} bytes, as the safetensors library",
            "checking that this is a safetensors file, and not a truncated one",
        )
    if 8 + count > size:
        raise FormatError(
            where,
            f"truncated or incomplete: {size} bytes, which end inside the header",
            f"{8 + count} bytes up to the header's end",
            "fetching the file again",
        )
    return count


def safetensors_header(
    tensors: dict[str, tuple[DType, tuple[int, ...]]],
    metadata: dict[str, str],
    copies: Mapping[str, SafetensorsEntry] | None = None,
) -> tuple[bytes, dict[str, int], int]:
    """Return a header for these tensors, the offset of each in the file, and the file's size.

    copies are tensors of another file, of whatever dtype. The widest elements come first, so that each
    tensor is aligned to its element.
    """
    stored = {
        name: (dtype.code, shape, math.prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in tensors.items()
    }
    stored |= {name: (copy.code, copy.shape, copy.size) for name, copy in (copies or {}).items()}
    fields: dict[str, object] = {METADATA: metadata} if metadata else {}
    offsets, end = {}, 0
    for name, (code, shape, size) in sorted(stored.items(), key=lambda item: -_BITS.get(item[1][0], 8)):
        offsets[name], end = end, end + size
        fields[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    begin = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: begin + offset for name, offset in offsets.items()},
        begin + end,
    )


def _parse_json(header: bytes, where: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise _DuplicateKey(next(name for name, count in counts.items() if count > 1))
        return fields

    def no_constant(text: str) -> None:
        raise ValueError(text)

    if not header.startswith(b"{"):
        raise FormatError(where, f"safetensors header begins {header[:16]!r}", "JSON, beginning '{'")
    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except _DuplicateKey as error:
        raise FormatError(
            where, f"duplicate key {error.args[0]!r} in the safetensors header", "each name once"
        ) from None
    except UnicodeDecodeError as error:
        raise FormatError(
            where, f"safetensors header is not UTF-8 at byte {8 + error.start}", "JSON in UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        at = 8 + len(error.doc[: error.pos].encode())
        raise FormatError(
            where, f"safetensors header is not JSON at byte {at}: {error.msg}", "JSON"
        ) from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        what = str(error).partition(";")[0]
        raise FormatError(where, f"safetensors header is not JSON: {what}", "JSON") from None
    except RecursionError:
        raise FormatError(where, "safetensors header is nested too deeply", "JSON") from None
    if not isinstance(fields, dict):
        raise FormatError(where, "safetensors header is not a JSON object", "one")
    return fields


def _parse_metadata(field: object, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    if isinstance(field, dict) and all(isinstance(value, str) for value in field.values()):
        return field, ()
    return {}, (f"{where}: {METADATA} is not a map of strings to strings; ignored",)


def _parse_entry(name: str, field: object, where: str) -> tuple[str, tuple[int, ...], int, int]:
    where = f"{where}#{name}"
    expected = '{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}'
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(where, "malformed safetensors entry", expected)
    code, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not (isinstance(code, str) and _are_counts(shape) and _are_counts(offsets)):
        raise FormatError(where, "malformed dtype, shape or data_offsets", expected)
    if not fits_numpy(shape):
        raise FormatError(where, f"too large a shape: {shape}"[:120], TOO_LARGE)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(where, f"malformed data_offsets {offsets}"[:120], expected)
    start, stop = offsets
    bits = _BITS.get(code)
    if bits is not None and (stop - start) * 8 != math.prod(shape) * bits:
        raise FormatError(
            where,
            f"data_offsets span {stop - start} bytes",
            f"{math.prod(shape) * bits / 8:.15g} bytes for {code} of shape {tuple(shape)}",
        )
    return code, tuple(shape), start, stop


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _check_cover(spans: list[tuple[int, int, str]], available: int, where: str) -> None:
    """Check that the tensors' bytes follow on each other from 0 to the file's end."""
    end, last = 0, "the header"
    for start, stop, name in sorted(spans):
        if start != end:
            what = "overlap" if start < end else "leave a hole of"
            raise FormatError(
                f"{where}#{name}",
                f"its bytes {what} {abs(start - end)} bytes "
                + (f"with {last!r}" if start < end else f"behind {last!r}"),
                f"data_offsets beginning at {end}",
            )
        end, last = stop, name
    if end > available:
        raise FormatError(
            where,
            f"truncated or incomplete: {available} bytes of data",
            f"{end} bytes, {end - available} more",
            "fetching the file again",
        )
    if end < available:
        raise FormatError(
            where,
            f"{available - end} bytes past the end of the last tensor",
            f"{end} bytes of data",
        )
