"""Tensors from pipes and files alike, and what is common to all formats."""

import io
import os
import threading
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import layernorm_cli
from layernorm_cli.errors import FormatError, InputError, UsageError
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.tensorfiles.reader import open_tensor, open_tensors, read_safetensors
from layernorm_cli.tensorfiles.refs import Ref

from .conftest import (
    NUMPY_NAMES,
    X,
    assert_same,
    checked,
    entry,
    fields,
    names_in,
    piped,
    quick,
    raw_npy,
    raw_safetensors,
    read,
    read_blocks,
    refused,
    sample,
    shapes,
    stdin_from,
    write,
)
from .test_npy import npy_bytes
from .test_npz import METHODS, SAVERS, zip_bytes

pytestmark = pytest.mark.usefixtures("no_descriptor_left")
BIG = sample("float32", (1000, 100))  # larger than a pipe's buffer


def container(kind, array):
    """The bytes of a file of this kind with one tensor."""
    if kind == "safetensors":
        return safetensors.numpy.save({"x": np.asarray(array, order="C")})
    if kind in SAVERS:
        file = io.BytesIO()
        SAVERS[kind](file, x=array)
        return file.getvalue()
    return npy_bytes(np.asarray(array, order=kind[0]))


CONTAINERS = ["C npy", "F npy", *SAVERS, "safetensors"]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("array", [X, BIG, sample("int8", (2, 3, 4))], ids=["small", "big", "3-d"])
def test_pipe(kind, array, temporary_folder):
    with piped(container(kind, array)):
        assert_same(read("-"), array)
    assert names_in(temporary_folder) == []


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pipe_in_blocks(kind, size):
    with piped(container(kind, BIG)):
        rows, tensor = read_blocks("-", size)
    assert_same(rows, BIG)
    assert tensor.ref == "-"


@pytest.mark.parametrize("kind", CONTAINERS)
def test_named_pipe(tmp_path, kind):
    path = tmp_path / "fifo.npy"
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_bytes, args=[container(kind, BIG)], daemon=True)
    thread.start()
    assert_same(read(path), BIG)
    thread.join()


def test_only_what_must_be_is_spooled(temporary_folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(temporary_folder / "missing"))
    with piped(container("C npy", BIG)):
        assert_same(read("-"), BIG)
    for kind in set(CONTAINERS) - {"C npy"}:
        with piped(container(kind, BIG)):
            refused("-", "no such file or directory", kind=InputError)


def test_rows_of_a_pipe_come_before_its_end():
    """The writer waits for the first row to be read, so nothing may wait for the last."""
    reading, writing = os.pipe()
    data = container("C npy", X)
    os.write(writing, data[:-16])
    impatience = threading.Timer(20, os.close, [writing])
    impatience.start()
    with stdin_from(reading), open_tensor("-") as tensor:
        source = tensor.rows(1)
        assert_same(source.read_rows(0, 2), X[:2])
        impatience.cancel()
        os.write(writing, data[-16:])
        os.close(writing)
        assert_same(source.read_rows(2, 3), X[2:])
    os.close(reading)


@pytest.mark.parametrize("name", [None, "x"])
@pytest.mark.parametrize("kind", [*SAVERS, "safetensors"])
def test_name_in_a_pipe(kind, name):
    with piped(container(kind, X)):
        ref = "-" if name is None else f"-#{name}"
        with open_tensor(ref) as tensor:
            assert (tensor.name, tensor.ref) == ("x", ref)
            assert_same(tensor.read(), X)


def test_missing_name_in_a_pipe_lists_the_others():
    with piped(safetensors.numpy.save({"a": X, "b": X})):
        refused("-", "2 tensors in the file", "-#NAME with one of: a, b", kind=InputError)
    with piped(safetensors.numpy.save({"a": X, "b": X})):
        refused("-#c", "no tensor 'c'", kind=InputError)


@pytest.mark.parametrize("order", "CF")
def test_name_of_an_npy_in_a_pipe_is_refused(order):
    with piped(container(f"{order} npy", X)):
        refused("-#x", "one tensor without a name", kind=UsageError)


@pytest.mark.parametrize("order", "CF")
def test_truncated_pipe(order):
    data = container(f"{order} npy", BIG)
    with piped(data[:-5]), pytest.raises(FormatError) as caught, open_tensor("-") as tensor:
        tensor.read()
    checked(caught.value, "-", "truncated: 399995 bytes of data", "400000 bytes")


@pytest.mark.parametrize("kept", [1, 5, 8, 9, 50])
def test_truncated_header_in_a_pipe(kept):
    with piped(container("C npy", X)[:kept]):
        refused("-")
    with piped(container("safetensors", X)[:kept]):
        refused("-")
    with piped(container("stored", X)[:kept]):
        refused("-")


@pytest.mark.parametrize("order", "CF")
def test_surplus_in_a_pipe_is_a_warning(order):
    with piped(container(f"{order} npy", BIG) + bytes(100_000)), open_tensor("-") as tensor:
        assert_same(tensor.read(), BIG)
        assert tensor.warnings == ["-: 100000 surplus bytes after the tensor; ignored"]


def test_empty_pipe():
    with piped(b""):
        refused("-", "the file is empty")


def test_malformed_npy_in_a_pipe():
    with piped(raw_npy(fields("|O"))):
        refused("-", "never loads")
    with piped(raw_npy(fields(shape=(-1,)))):
        refused("-", "malformed npy header: shape (-1,)")


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (5,)])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_small_shapes_in_a_pipe(kind, shape):
    with piped(container(kind, sample("float32", shape))):
        assert_same(read("-"), sample("float32", shape))


def test_more_rows_than_a_pipe_has():
    with piped(raw_npy(fields(shape=(1 << 50, 4)), bytes(100))), open_tensor("-") as tensor:
        source = tensor.rows(1)
        assert not source.read_rows(0, 4).any()
        with pytest.raises(FormatError) as caught:
            source.read_rows(4, 8)
    checked(caught.value, "-", "truncated: 100 bytes of data", f"{1 << 54} bytes")


def test_raw_bfloat16_in_a_pipe():
    array = sample("bfloat16")
    with piped(npy_bytes(array.view("V2"))):
        refused("-", "--assume-dtype bfloat16")
    with piped(npy_bytes(array.view("V2"))):
        assert_same(read("-", "bfloat16"), array)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_file_as_standard_input(put, kind):
    path = put("x", container(kind, X))
    with path.open("rb") as file, stdin_from(file.fileno()):
        assert_same(read("-"), X)
        assert_same(read("/dev/stdin"), X)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_half_read_file_as_standard_input(put, kind):
    """Whoever read before us left the file's position at the tensor."""
    path = put("x", b"before" + container(kind, X))
    with path.open("rb") as file:
        os.lseek(file.fileno(), 6, os.SEEK_SET)
        with stdin_from(file.fileno()):
            assert_same(read("-"), X)


def test_two_tensors_behind_each_other(put):
    path = put("x", npy_bytes(X) + npy_bytes(-X))
    with path.open("rb") as file:
        os.lseek(file.fileno(), len(npy_bytes(X)), os.SEEK_SET)
        with stdin_from(file.fileno()):
            assert_same(read("-"), -X)


def test_empty_file_as_standard_input(put):
    with put("x", b"").open("rb") as file, stdin_from(file.fileno()):
        refused("-", "the file is empty")


def test_folder_as_standard_input(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with stdin_from(fd):
        refused("-", "is a directory", kind=InputError)
    os.close(fd)


def test_closed_standard_input():
    saved = os.dup(0)
    os.close(0)
    try:
        refused("-", "bad file descriptor", kind=InputError)
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_device():
    refused("/dev/null", "the file is empty")


@pytest.mark.parametrize("kind", CONTAINERS)
def test_reads_twice_from_a_file(put, kind):
    path = put("x", container(kind, X))
    with open_tensor(str(path)) as tensor:
        assert_same(tensor.read(), X)
        assert_same(tensor.rows(1).read_rows(1, 3), X[1:])
        assert_same(tensor.read(), X)


@pytest.mark.parametrize("shape", [(1 << 10, 1 << 10), (1 << 5, 1 << 5, 1 << 10)])
def test_fortran_order_needs_little_memory(put, monkeypatch, shape):
    monkeypatch.setattr("layernorm_cli.tensorfiles.rows.COLUMN_BLOCK_BYTES", 1 << 16)
    array = np.arange(1 << 20, dtype="<f4").reshape(shape)
    path = put("x.npy", npy_bytes(np.asfortranarray(array)))
    tracemalloc.start()
    try:
        with open_tensor(str(path)) as tensor:
            source = tensor.rows(len(shape) - 1)
            for at in range(0, 1 << 10, 1 << 6):
                block = source.read_rows(at, at + (1 << 6))
                assert block[0, 0] == at << 10
        assert tracemalloc.get_traced_memory()[1] < array.nbytes / 4
    finally:
        tracemalloc.stop()


def test_fortran_order_without_room_to_turn_it(put, temporary_folder, monkeypatch):
    path = put("x.npy", npy_bytes(np.asfortranarray(sample("float32", (2, 3, 4)))))
    with open_tensor(str(path)) as tensor:
        monkeypatch.setattr("tempfile.tempdir", str(temporary_folder / "missing"))
        with pytest.raises(InputError) as caught:
            tensor.rows(2)
    checked(caught.value, str(path), "no such file or directory")


def test_rows_of_a_fortran_matrix_are_read_where_they_are(put, temporary_folder, monkeypatch):
    path = put("x.npy", npy_bytes(np.asfortranarray(X)))
    monkeypatch.setattr("tempfile.tempdir", str(temporary_folder / "missing"))
    with open_tensor(str(path)) as tensor:
        assert_same(tensor.rows(1).read_rows(1, 3), X[1:])


def test_fortran_order_in_a_file_that_shrinks(put, temporary_folder):
    path = put("x.npy", npy_bytes(np.asfortranarray(sample("float32", (2, 3, 4)))))
    with open_tensor(str(path)) as tensor:
        os.truncate(path, 200)
        with pytest.raises(FormatError) as caught:
            tensor.rows(2)
    checked(caught.value, str(path), "truncated: the file ends at byte 200")
    assert names_in(temporary_folder) == []


def test_public_name():
    assert layernorm_cli.open_tensor is open_tensor


def test_read_safetensors_of_an_open_file(put):
    path = put("x", raw_safetensors({"a": entry()}, bytes(4)))
    fd = os.open(path, os.O_RDONLY)
    header = read_safetensors(fd, "x")
    os.close(fd)
    assert [*header.entries] == ["a"]
    assert header.entries["a"].shape == (1,)
    assert header.entries["a"].offset == path.stat().st_size - 4


@given(
    kind=st.sampled_from(CONTAINERS),
    name=st.sampled_from(NUMPY_NAMES),
    shape=shapes.filter(len),
    size=st.integers(1, 30),
    pipe=st.booleans(),
    data=st.data(),
)
@quick
def test_rows_of_anything(tmp_path_factory, kind, name, shape, size, pipe, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    array = sample(name, shape)
    content = container(kind, array)
    expected = array.reshape(int(np.prod(shape[:axis])), int(np.prod(shape[axis:])))
    if pipe:
        with piped(content):
            rows, _ = read_blocks("-", size, axis)
    else:
        path = tmp_path_factory.getbasetemp() / "anything"
        path.write_bytes(content)
        rows, _ = read_blocks(path, size, axis)
    if expected.size:
        assert_same(rows, expected)
    else:
        assert rows.shape == expected.shape


@given(name=st.sampled_from([*DTYPES]), shape=shapes, kind=st.sampled_from(["npy", "safetensors"]))
@quick
def test_ours_through_ours(tmp_path_factory, name, shape, kind):
    array = sample(name, shape)
    if kind == "npy" and name not in NUMPY_NAMES:
        array = array.astype(np.float32)
    path = tmp_path_factory.getbasetemp() / f"ours.{kind}"
    write(path, {"y": array}, force=True)
    assert_same(read(path), array)
    with piped(path.read_bytes()):
        assert_same(read("-"), array)


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_zip_in_a_pipe(method):
    with piped(zip_bytes({"a.npy": npy_bytes(BIG)}, METHODS[method])):
        assert_same(read("-"), BIG)


MANY = {"a.x": X, "b.x": X + 1, "other": np.arange(5, dtype="<i2")}


def opened(ref, **options):
    """Name -> array of all tensors that a ref means, and the file's other tensors as bytes."""
    path, _, name = ref.partition("#")
    with open_tensors(Ref(ref, path, name or None), **options) as file:
        others = {
            other: b"".join(map(bytes, file.bytes_of(entry)))
            for other, entry in (file.others or {}).items()
        }
        return {tensor.name: tensor.read() for tensor in file.tensors}, others


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_several_tensors(tmp_path, kind):
    path = tmp_path / f"many.{kind}"
    np.savez(path, **MANY) if kind == "npz" else safetensors.numpy.save_file(MANY, path)
    found, others = opened(f"{path}#*.x")
    assert list(found) == ["a.x", "b.x"]
    for name, array in found.items():
        assert_same(array, MANY[name])
    assert others == ({} if kind == "npz" else {"other": MANY["other"].tobytes()})
    found, _ = opened(f"{path}#other")
    assert_same(found["other"], MANY["other"])
    with pytest.raises(InputError, match="3 tensors"):
        opened(str(path))


def test_the_glob_of_all_means_a_tensor_without_a_name(tmp_path):
    np.save(tmp_path / "x.npy", X)
    for ref in ("x.npy", "x.npy#*"):
        found, others = opened(str(tmp_path / ref))
        assert_same(found[None], X)
        assert others == {}
    with pytest.raises(UsageError, match="without a name"):
        opened(str(tmp_path / "x.npy#a*"))


def test_each_tensor_of_several_has_its_ref(tmp_path):
    path = tmp_path / "many.safetensors"
    safetensors.numpy.save_file(MANY, path)
    with open_tensors(Ref("typed#*.x", str(path), "*.x")) as file:
        assert [tensor.ref for tensor in file.tensors] == [f"{path}#a.x", f"{path}#b.x"]
        assert file.metadata == {}
    with open_tensors(Ref("typed#a.*", str(path), "a.*")) as file:
        assert [tensor.ref for tensor in file.tensors] == ["typed#a.*"]


def test_several_tensors_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        opened(str(tmp_path / "no.safetensors#*"))
