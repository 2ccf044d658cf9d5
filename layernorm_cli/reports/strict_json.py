"""Strict JSON: full precision, and strings for NaN and Infinity, which JSON has no numbers for."""

from __future__ import annotations

import json
import math

__all__ = ["to_json"]


def to_json(value: object, indent: int | None = None) -> str:
    """Return a record, or any nest of dicts, lists and plain values, as strict JSON text.

    >>> to_json({"eps": 1e-5, "max": float("inf")})
    '{"eps": 1e-05, "max": "Infinity"}'
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=True)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # a record
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
