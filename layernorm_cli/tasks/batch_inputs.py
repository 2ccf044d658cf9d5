"""Which files a batch is to read: files, directories, lists of them; and where each is in its tree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..checkpoints.names import natural_key
from ..errors import InputError, UsageError
from ..tensorfiles.exact_io import reason
from ..tensorfiles.refs import STDIN, is_address, parse_ref, without_secrets

__all__ = ["SUFFIXES", "BatchInput", "Selection", "find_inputs"]

SUFFIXES = (".npy", ".npz", ".safetensors")


class Selection(NamedTuple):
    """Globs of names (or paths below their directory) that a walk takes and leaves out; what it skips.

    Without include it takes the names that end as tensor files do.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skipped: str | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The globs of what is taken."""
        return self.include or tuple(f"*{suffix}" for suffix in SUFFIXES)


class BatchInput(NamedTuple):
    """A file, the tensor's name or glob in it, and its place in the tree that outputs mirror."""

    path: str
    name: str | None
    place: str


def find_inputs(
    given: Iterable[str],
    files_from: str | None,
    separator: bytes,
    selection: Selection,
    base: str | None,
) -> Iterator[BatchInput]:
    """Yield the files given, those below the directories given, and those of a list.

    A file given is in the top of the tree, those of a directory are as below it, and listed ones as
    their path says. With base all are as they lie below that directory.

    Raises InputError for a list or directory that cannot be read, UsageError for what is no ref, and
    for a file that is not below base.
    """
    listed = () if files_from is None else _listed(files_from, separator)
    for refs, is_listed in ((given, False), (listed, True)):
        for ref in refs:
            for one in _of_ref(ref, is_listed, selection):
                yield one if base is None else one._replace(place=_below(one.path, base))


def _of_ref(text: str, listed: bool, selection: Selection) -> Iterator[BatchInput]:
    if text == STDIN:
        hint = "--files-from - for a list of files, or layernorm apply -"
        raise UsageError(text, "standard input has no name for its output", "a file", hint)
    ref = parse_ref(text)
    place = _place(ref.path, listed)
    if not is_address(ref.path) and os.path.isdir(ref.path):
        below = place if listed else ""
        for path in _walk(ref.path, "", selection, ()):
            yield BatchInput(os.path.join(ref.path, path), ref.name, os.path.join(below, path))
        return
    names = _names_there(ref.path, selection)
    if names is None:
        yield BatchInput(ref.path, ref.name, place)
    else:
        below = place if listed else ""
        for name in names:
            path = f"{ref.path.rstrip('/')}/{name}"
            yield BatchInput(path, ref.name, os.path.join(below, name))


def _names_there(path: str, selection: Selection) -> list[str] | None:
    """The files taken below a directory at an address, in natural order; None for what is none."""
    if not is_address(path) or path.endswith(SUFFIXES):
        return None
    from ..tensorfiles.remote import find_remote

    found = find_remote(path)
    if found is None:
        return None
    root = path.rstrip("/")

    def taken(name: str) -> bool:
        parts = name.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        left_out = any(
            _matches(part, place, selection.exclude) for part, place in zip(parts, above, strict=True)
        )
        hidden = any(part.startswith(".") for part in parts)
        own = f"{root}/{name}".startswith(f"{selection.skipped}/")
        return not (hidden or left_out or own) and _matches(parts[-1], name, selection.wanted)

    return sorted(filter(taken, found), key=lambda name: ([*map(natural_key, name.split("/"))], name))


def _place(path: str, listed: bool) -> str:
    """Where a file, or a listed directory, is in the tree."""
    if is_address(path):
        path = without_secrets(path).partition("://")[2].removesuffix("?...").rpartition("@")[2]
        return path if listed else path.rstrip("/").rpartition("/")[2]
    if not listed:
        return os.path.basename(path)
    place = re.sub(r"^(/|\.\.(/|$))+", "", os.path.normpath(path))
    return "" if place == os.curdir else place


def _below(path: str, base: str) -> str:
    place = os.path.relpath(path, base)
    if place.split(os.sep)[0] == os.pardir:
        raise UsageError(path, f"is not below --base {base}", "files below it")
    return place


def _listed(files_from: str, separator: bytes) -> Iterator[str]:
    try:
        if files_from == STDIN:
            data = sys.stdin.buffer.read()
        else:
            with open(files_from, "rb") as file:
                data = file.read()
    except OSError as error:
        raise InputError(f"--files-from {files_from}", reason(error)) from None
    return (os.fsdecode(name) for name in data.split(separator) if name)


def _walk(
    root: str, folder: str, selection: Selection, above: tuple[tuple[int, int], ...]
) -> Iterator[str]:
    """Yield the paths below root of the files taken, in natural order.

    Links are followed, but not in circles. Hidden names are left out, as a shell's globs do.
    """
    here = os.path.join(root, folder)
    try:
        status = os.stat(here)
        with os.scandir(here) as scan:
            entries = [entry for entry in scan if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(here, reason(error)) from None
    identity = status.st_dev, status.st_ino
    if identity in above or (folder and os.path.realpath(here) == selection.skipped):
        return
    entries.sort(key=lambda entry: (natural_key(entry.name), entry.name))
    for entry in entries:
        path = os.path.join(folder, entry.name)
        if _matches(entry.name, path, selection.exclude):
            continue
        if entry.is_dir():
            yield from _walk(root, path, selection, (*above, identity))
        elif _matches(entry.name, path, selection.wanted) and (
            entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
        ):
            yield path


def _matches(name: str, path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in patterns)
