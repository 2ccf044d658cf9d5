"""The journal of outputs: what is read is what was written, whole lines only, from all machines."""

import os
from pathlib import Path

import pytest

from layernorm_cli.errors import OutputError
from layernorm_cli.tensorfiles.journal import (
    FOLDER,
    Entry,
    Stamp,
    entry_of,
    label_for,
    open_journal,
    read_journals,
    stamp_of,
    write_entry,
)

ENTRY = Entry(
    "y.npy", ".y.npy.00.tmp", Stamp(7, 2**62), "/in/x.npy", None, Stamp(9, 1), None, "ab", 3, 4
)
NAMES = ["ü.npy", "\udcff\n#.npy", '"\\.npy', "a b.npy"]


def write(*entries):
    with open_journal(".") as journal:
        for entry in entries:
            write_entry(journal, entry)


def journal():
    (path,) = Path(FOLDER).iterdir()
    return path


def test_round_trip(here):
    entries = [ENTRY._replace(output=name, input=name, name=name, checksum=name) for name in NAMES]
    entries.append(ENTRY._replace(read=None))
    write(*entries[:2])
    write(*entries[2:])
    assert list(read_journals(".")) == entries
    assert all(type(entry.made) is Stamp for entry in read_journals("."))


def test_no_journal(here):
    assert list(read_journals(".")) == []
    assert list(read_journals("nosuch")) == []


def test_any_cut_loses_the_last_line_only(here):
    other = ENTRY._replace(output="z.npy")
    write(ENTRY, other)
    data = journal().read_bytes()
    whole = len(data.splitlines(keepends=True)[0])
    for cut in range(whole, len(data) - 1):
        journal().write_bytes(data[:cut])
        assert list(read_journals(".")) == [ENTRY]
    write(other)  # behind what is left of a line
    assert list(read_journals(".")) == [ENTRY, other]


@pytest.mark.parametrize(
    "line", [b"\n", b"[]\n", b"3\n", b"null\n", b"{}\n", b"\xff\n", b"[1, 2]\n", b"[" * 9]
)
def test_lines_that_are_no_entries(line, here):
    write(ENTRY)
    with open(journal(), "ab") as file:
        file.write(line)
    write(ENTRY)
    assert list(read_journals(".")) == [ENTRY, ENTRY]


def test_journals_of_several_machines(here, monkeypatch):
    for host in ("one", "two/../x", ""):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        write(ENTRY._replace(output=host))
    assert {path.name for path in Path(FOLDER).iterdir()} == {
        "one.jsonl",
        "two_.._x.jsonl",
        "host.jsonl",
    }
    assert {entry.output for entry in read_journals(".")} == {"one", "two/../x", ""}


def test_appends_of_two_programs(here):
    with open_journal(".") as one, open_journal(".") as other:
        for index in range(50):
            write_entry((one, other)[index % 2], ENTRY._replace(rows=index))
    assert [entry.rows for entry in read_journals(".")] == list(range(50))


def test_a_folder_that_is_none(here):
    Path("file").write_bytes(b"")
    with pytest.raises(OutputError, match="file"), open_journal("file"):
        pass


def test_stamps(here):
    Path("x").write_bytes(b"12345")
    os.utime("x", ns=(1, 1234567890123456789))
    assert stamp_of("x") == (5, 1234567890123456789)


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("read", [None, Stamp(9, 2**62), Stamp(9, "etag-1")])
def test_labels_tell_what_an_output_was_made_from(name, read):
    entry = ENTRY._replace(temporary="", made=Stamp(0, 0), name=name, read=read, checksum="ab" * 32)
    label = label_for(entry)
    assert label.isascii()
    assert label.isprintable()
    assert len(label) < 1024
    assert entry_of(label, entry.output, entry.input, name) == entry
    assert entry_of(label, entry.output, "/in/other.npy", name) is None
    assert entry_of(label, entry.output, entry.input, "other") is None


@pytest.mark.parametrize("label", ["", "no json", "[]", "[1]", "{}", '"text"'])
def test_labels_of_others_tell_nothing(label):
    assert entry_of(label, "y.npy", "/in/x.npy", None) is None


def test_labels_are_short_however_long_names_are():
    assert len(label_for(ENTRY._replace(input="ü" * 4000, name="x" * 4000))) < 1024
