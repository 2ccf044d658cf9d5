"""The journal of a folder of outputs: what each whole output was made from, one line each.

A line is appended when an output is whole but still has its temporary name, and tells the output by
size and time of its last change, which renaming keeps. So whenever a program is killed, no line speaks
of what is not whole: either file is there as the line says, or the line counts for nothing. Outputs do
not depend on it. Each machine appends to a file of its own, in one write a line.

An object store, where nothing is renamed or appended to, keeps the same beside each object: its label.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import OutputError
from .exact_io import reason, write_next
from .refs import is_address

__all__ = [
    "FOLDER",
    "Entry",
    "Stamp",
    "entry_of",
    "label_for",
    "open_journal",
    "read_journals",
    "stamp_of",
    "write_entry",
]

FOLDER = ".layernorm-batch"


class Stamp(NamedTuple):
    """A file at a moment: its size in bytes, and when it was last changed (elsewhere: its version)."""

    size: int
    changed: int | str


class Entry(NamedTuple):
    """An output (in the journal's folder), its temporary name, its stamp, and what it was made from.

    input and name are the real path of a file and what was meant in it. checksum is of its content,
    where that was asked for; parameters are a digest of all that the result depends on besides the
    input. rows and bytes are what was normalized.
    """

    output: str
    temporary: str
    made: Stamp
    input: str
    name: str | None
    read: Stamp | None
    checksum: str | None
    parameters: str
    rows: int
    bytes: int


def stamp_of(path: str) -> Stamp | None:
    """Return the stamp of a file; None for an address that gives none.

    Raises OSError, and for an address InputError.
    """
    if is_address(path):
        from .remote import version_of

        version = version_of(path)
        return None if version is None or not version.token else Stamp(*version)
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def open_journal(folder: str) -> Iterator[int]:
    """Open this machine's journal of a folder, to append to; Raises OutputError."""
    place = os.path.join(folder, FOLDER)
    host = "".join(c if c.isalnum() or c in "-." else "_" for c in socket.gethostname())
    path = os.path.join(place, f"{host or 'host'}.jsonl")
    try:
        os.makedirs(place, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(path, reason(error)) from None
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # a full disk cut the last line
            write_next(fd, memoryview(b"\n"))
        yield fd
    finally:
        os.close(fd)


def write_entry(journal: int, entry: Entry) -> None:
    """Append an entry; Raises OSError."""
    write_next(journal, memoryview(f"{json.dumps(entry)}\n".encode()))


def label_for(entry: Entry) -> str:
    """Return an entry as the label of an object, which is short and ASCII."""
    said = (entry.read, entry.checksum, entry.parameters, entry.rows, entry.bytes)
    return json.dumps((_identity(entry.input, entry.name), *said))


def entry_of(label: str, output: str, input: str, name: str | None) -> Entry | None:
    """Return the entry that a label tells of an output; None where it was made from another input."""
    with contextlib.suppress(ValueError, TypeError):
        identity, read, *rest = json.loads(label)
        if identity == _identity(input, name):
            read = read and Stamp(*read)
            return Entry(output, "", Stamp(0, 0), input, name, read, *rest)
    return None


def _identity(input: str, name: str | None) -> str:
    return hashlib.sha256(json.dumps((input, name)).encode()).hexdigest()[:32]


def read_journals(folder: str) -> Iterator[Entry]:
    """Yield what all machines have written, less lines that are not whole; Raises OSError."""
    place = os.path.join(folder, FOLDER)
    try:
        names = sorted(os.listdir(place))
    except FileNotFoundError:
        return
    for host in names:
        with open(os.path.join(place, host), "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError):
                    output, temporary, made, input, name, read, *rest = json.loads(line)
                    read = read and Stamp(*read)
                    yield Entry(output, temporary, Stamp(*made), input, name, read, *rest)
