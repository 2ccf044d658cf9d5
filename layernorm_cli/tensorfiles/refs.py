"""Refs: how a user names a tensor, as FILE, FILE#NAME or - for standard input."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InputError, UsageError

__all__ = ["STDIN", "Ref", "find_name", "parse_ref"]

STDIN = "-"


class Ref(NamedTuple):
    """A ref as typed, taken apart: the file's path, and the tensor's name in it or None."""

    text: str
    path: str
    name: str | None = None


def parse_ref(text: str) -> Ref:
    """Take a ref apart at a '#'; an existing file whose name has a '#' in it wins.

    Raises UsageError for an empty ref or name, and for addresses of other machines.
    """
    if not text:
        raise UsageError("empty file name", "nothing to read", "FILE, FILE#TENSOR or -")
    if "://" in text:
        raise UsageError(text, "reading from other machines is not part of this version", "a file")
    if text == STDIN or os.path.exists(text) or "#" not in text:
        return Ref(text, text)
    cuts = [i for i, c in enumerate(text) if c == "#"]
    cut = next((i for i in reversed(cuts) if os.path.exists(text[:i])), cuts[0])
    path, name = text[:cut], text[cut + 1 :]
    if not path or not name:
        raise UsageError(text, "an empty file or tensor name beside '#'", "FILE#TENSOR")
    return Ref(text, path, name)


def find_name(ref: Ref, names: Iterable[str]) -> str:
    """Return the tensor that a ref means: by its exact name, a unique dotted ending, or as the only one.

    Raises InputError that lists the names where there is no such tensor, or more than one.
    """
    names = list(names)
    if ref.name is None:
        if len(names) == 1:
            return names[0]
        found = f"{len(names)} tensors in the file" if names else "no tensors in the file"
        hint = f"{ref.path}#NAME with one of: {_listed(names)}" if names else None
        raise InputError(ref.text, found, "one, or its name behind '#'", hint)
    if ref.name in names:
        return ref.name
    endings = [n for n in names if n.endswith(ref.name) and n[: -len(ref.name)][-1:] in (".", "/")]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise InputError(
            ref.text, f"{len(endings)} tensors end so", "one", f"one of: {_listed(endings)}"
        )
    alike = [n for n in names if ref.name.lower() in n.lower()] or names
    raise InputError(
        ref.text,
        f"no tensor {ref.name!r} in {ref.path}",
        None,
        f"one of: {_listed(alike)}" if names else None,
    )


def _listed(names: list[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
