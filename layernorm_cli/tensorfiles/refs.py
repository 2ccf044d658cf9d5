"""Refs: how a user names a tensor, as FILE, FILE#NAME, an address with #NAME, or - for stdin."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..errors import InputError, UsageError

__all__ = ["STDIN", "Ref", "find_name", "find_names", "is_address", "parse_ref", "without_secrets"]

STDIN = "-"


class Ref(NamedTuple):
    """A ref as messages show it, taken apart: the file's path, and the tensor's name in it or None.

    That is as typed, less the secrets of an address.
    """

    text: str
    path: str
    name: str | None = None

    @property
    def file(self) -> str:
        """The path as messages show it."""
        return without_secrets(self.path)


def is_address(path: str) -> bool:
    """Return whether a path is an address, PROTOCOL://..., and not a file of this machine."""
    return "://" in path and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def without_secrets(path: str) -> str:
    """Return a path as messages may show it: an address without password and query (signed, often).

    >>> without_secrets("https://me:secret@host/x.npy?key=123#gamma")
    'https://***@host/x.npy?...#gamma'
    """
    if not is_address(path) or path.startswith("hf://"):  # there, behind '@' is a revision
        return path
    path = re.sub(r"://[^/?#]*@", "://***@", path)
    return re.sub(r"^([^#?]*)\?[^#]+", r"\1?...", path) if path.lower().startswith("http") else path


def parse_ref(text: str) -> Ref:
    """Take a ref apart at a '#'; an existing file whose name has a '#' in it wins.

    Raises UsageError for an empty ref, file or name.
    """
    if not text:
        raise UsageError("empty file name", "nothing to read", "FILE, FILE#TENSOR or -")
    if is_address(text):
        return _parse_address(text)
    if text == STDIN or os.path.exists(text) or "#" not in text:
        return Ref(text, text)
    cuts = [i for i, c in enumerate(text) if c == "#"]
    cut = next((i for i in reversed(cuts) if os.path.exists(text[:i])), cuts[0])
    path, name = text[:cut], text[cut + 1 :]
    if not path or not name:
        raise UsageError(text, "an empty file or tensor name beside '#'", "FILE#TENSOR")
    return Ref(text, path, name)


def _parse_address(text: str) -> Ref:
    path, mark, name = text.partition("#")
    if path.endswith("://") or (mark and not name):
        expected = "PROTOCOL://FILE or PROTOCOL://FILE#TENSOR"
        raise UsageError(without_secrets(text), "an empty file or tensor name in an address", expected)
    return Ref(without_secrets(text), path, name or None)


def find_name(ref: Ref, names: Iterable[str]) -> str:
    """Return the tensor that a ref means: by its exact name, a unique dotted ending, or as the only one.

    Raises InputError that lists the names where there is no such tensor, or more than one.
    """
    names = list(names)
    if ref.name is None:
        if len(names) == 1:
            return names[0]
        found = f"{len(names)} tensors in the file" if names else "no tensors in the file"
        hint = f"{ref.file}#NAME with one of: {_listed(names)}" if names else None
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
        f"no tensor {ref.name!r} in {ref.file}",
        None,
        f"one of: {_listed(alike)}" if names else None,
    )


def find_names(ref: Ref, names: Iterable[str]) -> list[str]:
    """Return the tensors that a ref means: one, as find_name says, or all whose names match its glob.

    A glob may match an end of a name, as a plain name may be one. A name with *, ? or [ in it wins.

    Raises InputError that lists the names where there is no such tensor.

    >>> find_names(Ref("x#h.*.in", "x", "h.*.in"), ["model.h.0.in", "model.h.0.out", "h.1.in"])
    ['model.h.0.in', 'h.1.in']
    """
    names = list(names)
    if ref.name is None or ref.name in names or not re.search(r"[*?[]", ref.name):
        return [find_name(ref, names)]
    patterns = (ref.name, f"*.{ref.name}", f"*/{ref.name}")
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return found or [find_name(ref, names)]


def _listed(names: list[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
