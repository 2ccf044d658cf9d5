"""Bytes of files here, and of those elsewhere as far as no server is needed; paths, listings."""

import io
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError, InputError
from layernorm_cli.tensorfiles import bytes_at
from layernorm_cli.tensorfiles.bytes_at import (
    as_file,
    join,
    least_bytes,
    list_dir,
    open_source,
    parent,
    read_at,
    read_ranges,
    read_small,
    read_upto,
    size_of,
)
from layernorm_cli.tensorfiles.remote import RemoteFile

from .conftest import checked, quick

DATA = np.random.default_rng(0).bytes(1000)


def far(data=DATA, head=100):
    return RemoteFile(len(data), data[:head], lambda offset, size: data[offset : offset + size])


@pytest.fixture(params=["here", "far"])
def source(request, tmp_path):
    if request.param == "far":
        yield far()
    else:
        (tmp_path / "x").write_bytes(DATA)
        with open_source(str(tmp_path / "x")) as opened:
            yield opened


def test_size(source):
    assert size_of(source) == 1000


@pytest.mark.parametrize(("count", "at"), [(0, 0), (10, 0), (100, 0), (101, 0), (10, 95), (1000, 0)])
def test_bytes_at(source, count, at):
    view = bytearray(count)
    read_at(source, memoryview(view), at, "x")
    assert view == DATA[at : at + count] == read_upto(source, count, at)


@pytest.mark.parametrize(("count", "at"), [(1001, 0), (1, 1000), (10, 991), (5, 2000)])
def test_bytes_behind_the_end(source, count, at):
    end = max(1000, at)
    for read in (
        lambda: read_at(source, memoryview(bytearray(count)), at, "x"),
        lambda: read_ranges(source, [(0, 5), (at, count)], "x"),
    ):
        with pytest.raises(FormatError) as caught:
            read()
        checked(caught.value, "x", f"the file ends at byte {end}", f"at least {at + count} bytes")
    assert read_upto(source, count, at) == DATA[at : at + count]


def test_ranges(source):
    ranges = [(5, 10), (900, 100), (0, 0), (5, 10), (0, 1000)]
    assert read_ranges(source, ranges, "x") == [DATA[at : at + size] for at, size in ranges]
    assert read_ranges(source, [], "x") == []


def test_small_reads_only_here(source):
    assert (least_bytes(source) == 1) == isinstance(source, int)


@given(steps=st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(-50, 50), st.integers(0, 200))))
@quick
def test_as_file(steps):
    ours, theirs = as_file(far()), io.BytesIO(DATA)
    for whence, offset, size in steps:
        base = {0: 0, 1: theirs.tell(), 2: 1000}[whence]
        if base + offset < 0:
            with pytest.raises(ValueError, match="negative"):
                as_file(far()).seek(offset if whence == 0 else -1001, whence if whence != 1 else 0)
        else:
            assert ours.seek(offset, whence) == theirs.seek(offset, whence)
        assert ours.read(size) == theirs.read(size)


def test_zip_in_a_remote_file():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", DATA)
        archive.writestr("b", bytes(10_000))
    with zipfile.ZipFile(as_file(far(file.getvalue()))) as archive:
        assert archive.read("a") == DATA
        assert archive.read("b") == bytes(10_000)


def test_no_descriptor_is_left(tmp_path, no_descriptor_left):
    (tmp_path / "x").write_bytes(DATA)
    with open_source(str(tmp_path / "x")) as opened, as_file(opened) as file:
        assert file.read() == DATA
    for path, what in ((tmp_path, "is a directory"), (tmp_path / "y", "no such file or directory")):
        with pytest.raises(InputError) as caught, open_source(str(path), "as typed"):
            pass
        checked(caught.value, "as typed", what)


def test_read_small(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "empty").write_bytes(b"")
    assert read_small(str(tmp_path / "config.json")) == b"{}"
    assert read_small(str(tmp_path / "empty")) == b""
    assert read_small(str(tmp_path / "nosuch")) is None
    assert read_small(str(tmp_path / "empty" / "nosuch")) is None
    with pytest.raises(InputError, match="is a directory"):
        read_small(str(tmp_path))
    monkeypatch.setattr(bytes_at, "SMALL", 1)
    with pytest.raises(InputError, match="has 2 bytes"):
        read_small(str(tmp_path / "config.json"))


def test_list_dir(tmp_path):
    for name in "ba":
        (tmp_path / name).write_bytes(b"")
    assert list_dir(str(tmp_path)) == ["a", "b"]
    assert list_dir(str(tmp_path / "a")) is None
    assert list_dir(str(tmp_path / "nosuch")) is None


def test_what_only_root_may_see(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root sees everything")
    folder = tmp_path / "closed"
    folder.mkdir(0)
    for read in (list_dir, lambda path: read_small(f"{path}/x")):
        with pytest.raises(InputError, match="permission denied"):
            read(str(folder))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.npy", "a"),
        ("/b.npy", "/"),
        ("b.npy", "."),
        ("s3://bucket/a/b?c", "s3://bucket/a"),
        ("hf://org/repo@v1/b", "hf://org/repo@v1"),
        ("https://host/a/b.npy?path=x/y", "https://host/a?path=x/y"),
        ("https://host/b.npy", "https://host"),
    ],
)
def test_parent(path, expected):
    assert parent(path) == expected


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("a", "b.npy", "a/b.npy"),
        ("s3://bucket", "b#?", "s3://bucket/b#?"),
        ("s3://bucket/a/", "b", "s3://bucket/a/b"),
        ("https://host/a?key=1", "b c#d", "https://host/a/b%20c%23d?key=1"),
        ("https://host", "sub/b", "https://host/sub/b"),
    ],
)
def test_join(path, name, expected):
    assert join(path, name) == expected
