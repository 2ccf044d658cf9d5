"""Whole reads and writes, although the system does a part of them at a time."""

import contextlib
import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError, InputError
from layernorm_cli.tensorfiles import exact_io
from layernorm_cli.tensorfiles.exact_io import (
    copy_to_spool,
    open_spool,
    read_at,
    read_next,
    reason,
    reserve,
    write_at,
    write_next,
)

from .conftest import checked, names_in, pipe_of, quick

DATA = bytes(range(256)) * 40


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    os.write(fd, DATA)
    yield fd
    os.close(fd)


@pytest.fixture
def part_at_a_time(monkeypatch):
    """Let the system read and write 7 bytes at the most."""
    preadv, readv, pwrite, write = os.preadv, os.readv, os.pwrite, os.write
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "readv", lambda fd, views: readv(fd, [views[0][:7]]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))


def taken(fd, size, at):
    data = bytearray(size)
    read_at(fd, memoryview(data), at, "x")
    return bytes(data)


@pytest.mark.parametrize(("size", "at"), [(0, 0), (1, 0), (100, 3), (len(DATA), 0), (1, len(DATA) - 1)])
def test_read_at(fd, size, at):
    assert taken(fd, size, at) == DATA[at : at + size]


def test_read_at_in_parts(fd, part_at_a_time):
    assert taken(fd, 1000, 5) == DATA[5:1005]


@pytest.mark.parametrize(("size", "at"), [(len(DATA) + 1, 0), (1, len(DATA)), (10, len(DATA) - 9)])
def test_read_at_beyond_the_end(fd, size, at):
    with pytest.raises(FormatError) as caught:
        taken(fd, size, at)
    end = max(len(DATA), at)
    checked(caught.value, "x", f"the file ends at byte {end}", f"at least {at + size} bytes")


def test_read_at_of_a_folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(InputError, match=r"^x: is a directory$"):
        taken(fd, 1, 0)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, len(DATA), len(DATA) + 1])
def test_read_next(size, part_at_a_time):
    data = bytearray(size)
    with pipe_of(DATA) as reading:
        assert read_next(reading, memoryview(data)) == min(size, len(DATA))
    assert data.startswith(DATA[:size])


@given(parts=st.lists(st.binary(max_size=20), max_size=5), at=st.integers(0, 30))
@quick
def test_writes(tmp_path_factory, parts, at):
    path = tmp_path_factory.getbasetemp() / "written"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for part in parts:
        write_next(fd, memoryview(part))
    write_at(fd, memoryview(b"mark"), at)
    os.close(fd)
    whole = bytearray(b"".join(parts).ljust(at + 4, b"\0"))
    whole[at : at + 4] = b"mark"
    assert path.read_bytes() == whole


def test_writes_in_parts(fd, part_at_a_time):
    write_at(fd, memoryview(DATA[::-1]), 10)
    assert taken(fd, len(DATA) + 10, 0) == DATA[:10] + DATA[::-1]
    write_next(fd, memoryview(DATA))
    assert taken(fd, len(DATA), len(DATA)) == DATA


@pytest.mark.parametrize("size", [0, 1, 12345])
@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_reserve(tmp_path, monkeypatch, size, refusal):
    def refuse(fd, start, length):
        raise OSError(refusal, "no")

    if refusal is not None:
        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with (tmp_path / "x").open("wb") as file:
        reserve(file.fileno(), size)
    assert (tmp_path / "x").read_bytes() == bytes(size)


def test_reserve_without_fallocate(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "x").open("wb") as file:
        reserve(file.fileno(), 100)
    assert (tmp_path / "x").stat().st_size == 100


def test_reserve_on_a_full_disk(tmp_path, monkeypatch):
    def full(fd, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with (tmp_path / "x").open("wb") as file, pytest.raises(OSError, match="No space"):
        reserve(file.fileno(), 100)


def test_spool_has_no_name(temporary_folder):
    with contextlib.ExitStack() as files:
        fd = open_spool(files)
        assert names_in(temporary_folder) == []
        write_next(fd, memoryview(DATA))
        assert taken(fd, len(DATA), 0) == DATA
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("chunk", [1, 100, len(DATA), 1 << 20])
def test_copy_to_spool(monkeypatch, chunk):
    monkeypatch.setattr(exact_io, "CHUNK", chunk)
    with pipe_of(DATA) as reading, contextlib.ExitStack() as files:
        spool = open_spool(files)
        copy_to_spool(reading, b"head", spool)
        assert os.fstat(spool).st_size == 4 + len(DATA)
        assert taken(spool, 4 + len(DATA), 0) == b"head" + DATA


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a"),
            "no such file or directory",
        ),
        (OSError("Something else"), "something else"),
    ],
)
def test_reason(error, text):
    assert reason(error) == text
