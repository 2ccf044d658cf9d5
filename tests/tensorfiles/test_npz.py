"""npz archives, against numpy's own, and archives that are not npz."""

import io
import os
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import InputError, LayernormError
from layernorm_cli.tensorfiles.reader import open_tensor

from .conftest import (
    NUMPY_NAMES,
    X,
    assert_same,
    checked,
    fields,
    quick,
    raw_npy,
    read,
    read_blocks,
    refused,
    sample,
    shapes,
)
from .test_npy import Bomb, npy_bytes

pytestmark = pytest.mark.usefixtures("no_descriptor_left")
SAVERS = {"stored": np.savez, "deflated": np.savez_compressed}
METHODS = {
    "stored": zipfile.ZIP_STORED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}


def zip_bytes(members, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)
@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_reads_numpys(tmp_path, save, name):
    a, b = sample(name), np.asfortranarray(sample(name, (4, 3, 2)))
    save(tmp_path / "x.npz", a=a, b=b.astype(b.dtype.newbyteorder(">")))
    assert_same(read(f"{tmp_path}/x.npz#a"), a)
    assert_same(read(f"{tmp_path}/x.npz#b"), b)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_compression(put, method):
    path = put("x.npz", zip_bytes({"a.npy": npy_bytes(X), "b.npy": npy_bytes(-X)}, method))
    assert_same(read(f"{path}#a"), X)
    assert_same(read(f"{path}#b"), -X)


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_of_members(tmp_path, save, size):
    array = sample("float32", (2, 3, 4))
    save(tmp_path / "x.npz", other=X, array=array)
    rows, tensor = read_blocks(f"{tmp_path}/x.npz#array", size)
    assert_same(rows, array.reshape(6, 4))
    assert (tensor.name, tensor.ref, tensor.shape) == ("array", f"{tmp_path}/x.npz#array", (2, 3, 4))


def test_single_member_needs_no_name(tmp_path):
    np.savez(tmp_path / "x.npz", X)
    with open_tensor(f"{tmp_path}/x.npz") as tensor:
        assert tensor.name == "arr_0"
        assert_same(tensor.read(), X)


def test_several_members_are_listed(tmp_path):
    np.savez(tmp_path / "x.npz", one=X, two=X, three=X)
    message = refused(tmp_path / "x.npz", "3 tensors in the file", kind=InputError)
    assert message.endswith("x.npz#NAME with one of: one, two, three")


def test_missing_member_lists_the_others(tmp_path):
    np.savez(tmp_path / "x.npz", one=X, two=X)
    refused(f"{tmp_path}/x.npz#three", "no tensor 'three'", "one of: one, two", kind=InputError)


def test_suffix_of_a_member_is_enough(put):
    path = put("x.npz", zip_bytes({"h.0.ln.npy": npy_bytes(X), "folder/b.npy": npy_bytes(-X)}))
    assert_same(read(f"{path}#ln"), X)
    assert_same(read(f"{path}#b"), -X)


@pytest.mark.parametrize("name", ["a#b", "#", "größe", "a b", "[red]", "x.npy", ".."])
def test_odd_member_names(put, name):
    path = put("x.npz", zip_bytes({f"{name}.npy": npy_bytes(X), "other.npy": npy_bytes(-X)}))
    assert_same(read(f"{path}#{name}"), X)


def test_other_members_do_not_count(put):
    path = put("x.npz", zip_bytes({"README": b"hello", "x.npy": npy_bytes(X), "folder/": b""}))
    assert_same(read(path), X)


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors", "x", "x.zip"])
def test_content_decides(put, name):
    assert_same(read(put(name, zip_bytes({"a.npy": npy_bytes(X)}))), X)


def test_prefix_before_the_archive(put):
    """Offsets in a zip count from where the archive begins, not the file."""
    start = zip_bytes({"x.npy": npy_bytes(-X)})
    path = put("x.npz", start + zip_bytes({"x.npy": npy_bytes(X)}))
    assert_same(read(path), X)
    with np.load(path) as arrays:
        assert_same(arrays["x"], X)


def test_zip64_member_behind_five_gigabytes(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("first.npy", npy_bytes(-X))
        archive.fp.seek(5 << 30)
        archive.start_dir = 5 << 30
        archive.writestr("far.npy", npy_bytes(X))
    assert path.stat().st_size > 5 << 30
    assert_same(read(f"{path}#far"), X)
    assert_same(read(f"{path}#first"), -X)


def test_surplus_bytes_in_a_member(put):
    path = put("x.npz", zip_bytes({"a.npy": npy_bytes(X) + b"ab"}))
    with open_tensor(str(path)) as tensor:
        assert_same(tensor.read(), X)
        assert tensor.warnings == [f"{path}: 2 surplus bytes after the tensor; ignored"]


def test_member_of_raw_bfloat16(tmp_path):
    array = sample("bfloat16")
    np.savez(tmp_path / "x.npz", a=array)
    refused(tmp_path / "x.npz", "--assume-dtype bfloat16")
    assert_same(read(tmp_path / "x.npz", "bfloat16"), array)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (npy_bytes(X)[:-1], "truncated: 47 bytes of data"),
        (npy_bytes(X)[:20], "truncated: 10 bytes of npy header"),
        (b"", "not an npy header: b''"),
        (b"no npy at all", "not an npy header: b'no npy a'"),
        (npy_bytes(np.zeros(2, "<c8")), "complex64"),
        (raw_npy(fields(shape=(1 << 40,)), bytes(4)), "truncated: 4 bytes of data"),
    ],
    ids=["truncated", "header", "empty", "text", "complex", "huge"],
)
def test_malformed_member(put, method, data, shown):
    path = put("x.npz", zip_bytes({"a.npy": data, "b.npy": npy_bytes(X)}, method))
    refused(f"{path}#a", shown)
    assert_same(read(f"{path}#b"), X)


def test_nothing_is_unpickled(put, tmp_path):
    payload = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    npy = raw_npy(fields("|O", ()), payload)
    members = {"a.npy": npy, "data.pkl": payload, "b.npy": npy_bytes(X)}
    path = put("x.npz", zip_bytes(members, zipfile.ZIP_DEFLATED))
    refused(f"{path}#a", "pickles, which layernorm never loads")
    assert_same(read(f"{path}#b"), X)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.npz", "model.safetensors", "model"])
def test_pytorch_checkpoint(put, tmp_path, name):
    payload = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    members = {"archive/data.pkl": payload, "archive/data/0": bytes(64), "archive/version": b"3\n"}
    refused(put(name, zip_bytes(members)), "PyTorch checkpoint", "pickles, which layernorm never loads")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("members", [{}, {"README": b"hello"}])
def test_zip_without_npy(put, members):
    refused(put("x.npz", zip_bytes(members)), "a zip archive without .npy members")


def test_truncated_archive(put):
    data = zip_bytes({"a.npy": npy_bytes(X)})
    for kept in range(4, len(data)):
        refused(put("x.npz", data[:kept]), "damaged npz archive", "fetching the file again")


@pytest.mark.parametrize("method", ["deflated", "bzip2", "lzma"])
def test_damaged_compressed_member(put, method):
    data = bytearray(zip_bytes({"a.npy": npy_bytes(sample("float64", (40, 5)))}, METHODS[method]))
    data[60:160] = bytes(100)
    refused(put("x.npz", bytes(data)), kind=InputError)


def test_wrong_checksum_of_compressed_member(put):
    data = zip_bytes({"a.npy": npy_bytes(X)}, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        checksum = archive.infolist()[0].CRC.to_bytes(4, "little")
    assert data.count(checksum) == 2
    refused(put("x.npz", data.replace(checksum, b"abcd")), "damaged npz archive", "CRC")


def test_encrypted_member(put):
    data = bytearray(zip_bytes({"a.npy": npy_bytes(X)}))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    refused(put("x.npz", bytes(data)), "encrypted")


def test_unknown_compression(put):
    data = bytearray(zip_bytes({"a.npy": npy_bytes(X)}))
    data[8] = 97
    data[data.index(b"PK\x01\x02") + 10] = 97
    refused(put("x.npz", bytes(data)), "compression")


def test_member_name_not_in_utf_8(put):
    data = zip_bytes({"größe.npy": npy_bytes(X)}).replace("ö".encode(), b"\xff\xff")
    refused(put("x.npz", data), "damaged npz archive", "utf-8")


def test_member_without_local_header(put):
    data = bytearray(zip_bytes({"a.npy": npy_bytes(-X), "b.npy": npy_bytes(X)}))
    data[data.rindex(b"PK\x03\x04")] = 0
    path = put("x.npz", bytes(data))
    refused(f"{path}#b", "no local header")
    assert_same(read(f"{path}#a"), -X)


@pytest.mark.parametrize("method", ["stored", "deflated"])
def test_size_that_the_archive_only_claims(put, method):
    """The central directory says 1 GiB, and the npy header a shape to match."""
    data = bytearray(zip_bytes({"a.npy": raw_npy(fields(shape=(1 << 28,)))}, METHODS[method]))
    at = data.index(b"PK\x01\x02")
    size = ((1 << 30) + 200).to_bytes(4, "little")
    data[at + 24 : at + 28] = size
    if method == "stored":
        data[at + 20 : at + 24] = size
    path = put("x.npz", bytes(data))
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_compressed_members_leave_nothing(put, temporary_folder):
    data = zip_bytes({"a.npy": npy_bytes(X), "b.npy": npy_bytes(X)[:-1]}, zipfile.ZIP_DEFLATED)
    path = put("x.npz", data)
    with open_tensor(f"{path}#a") as tensor:
        assert_same(tensor.read(), X)
        assert list(temporary_folder.iterdir()) == []
    refused(f"{path}#b", "truncated")
    assert list(temporary_folder.iterdir()) == []


def test_memory_does_not_depend_on_the_size_of_a_deflated_member(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros((1 << 12, 1 << 12), np.float32))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with open_tensor(str(path)) as tensor:
            source = tensor.rows(1)
            for at in range(0, source.rows, 256):
                assert not source.read_rows(at, at + 256).any()
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


@given(
    place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), method=st.sampled_from([*METHODS])
)
@quick
def test_any_damage_is_read_or_refused(tmp_path_factory, place, byte, method):
    data = bytearray(zip_bytes({"a.npy": npy_bytes(X), "b.npy": npy_bytes(X)}, METHODS[method]))
    data[int(place * len(data))] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(data)
    try:
        with open_tensor(f"{path}#b") as tensor:
            assert tensor.read().shape == tensor.shape
    except LayernormError as error:
        checked(error, str(path))


@given(
    shape=shapes,
    name=st.sampled_from(NUMPY_NAMES),
    fortran=st.booleans(),
    save=st.sampled_from([*SAVERS.values()]),
)
@quick
def test_any_array_of_numpys(tmp_path_factory, shape, name, fortran, save):
    array = np.asarray(sample(name, shape), order="F" if fortran else "C")
    path = tmp_path_factory.getbasetemp() / "any.npz"
    save(path, a=array, b=X)
    assert_same(read(f"{path}#a"), array)


def test_unreadable_spool(put, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    path = put("x.npz", zip_bytes({"a.npy": npy_bytes(X)}, zipfile.ZIP_DEFLATED))
    refused(path, "no such file or directory", kind=InputError)
    assert os.listdir(tmp_path) == ["x.npz"]
