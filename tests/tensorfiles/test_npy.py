"""npy headers and files, against numpy's own reader and writer."""

import io
import math
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError, LayernormError, UsageError
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.tensorfiles.npy import npy_header, read_npy_header
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
    write,
)

VERSIONS = [(1, 0), (2, 0), (3, 0)]


def npy_bytes(array, version=(1, 0)):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=False)
    return file.getvalue()


def parsed(data, assume=None):
    return read_npy_header(io.BytesIO(data).read, "x.npy", assume and DTYPES[assume])


def test_sample_bits_are_compared():
    with pytest.raises(AssertionError):
        assert_same(X, -X)


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("version", VERSIONS)
def test_reads_numpys(put, name, order, version):
    array = sample(name)
    array = array.astype(array.dtype.newbyteorder(order))
    path = put("x.npy", npy_bytes(array, version))
    with open_tensor(str(path)) as tensor:
        assert (tensor.dtype.name, tensor.shape, tensor.name) == (name, (3, 5), None)
        assert tensor.ref == str(path)
    assert_same(read(path), array)


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_reads_ours(tmp_path, name):
    array = sample(name)
    write(tmp_path / "y.npy", {"y": array})
    assert_same(np.load(tmp_path / "y.npy"), array)


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 1), (2, 0, 3), (12345, 67, 8, 9)])
def test_header_is_byte_for_byte_numpys(name, shape):
    dtype = DTYPES[name]
    file = io.BytesIO()
    described = np.lib.format.header_data_from_array_1_0(np.empty(0, sample(name).dtype))
    np.lib.format.write_array_header_1_0(file, described | {"shape": shape})
    ours = npy_header(dtype, shape)
    assert len(ours) % 64 == 0
    assert np.lib.format.read_array_header_1_0(io.BytesIO(ours[8:])) == (
        shape,
        False,
        sample(name).dtype,
    )
    header = parsed(ours)
    assert (header.dtype, header.shape, header.fortran_order) == (dtype, shape, False)
    assert header.data_offset == len(ours)
    assert ours.rstrip(b" \n") == file.getvalue().rstrip(b" \n")


@pytest.mark.parametrize("dimensions", range(65))
def test_header_of_any_length(dimensions):
    shape = (1,) * dimensions
    ours = npy_header(DTYPES["float32"], shape)
    assert len(ours) % 64 == 0
    assert ours.endswith(b"\n")
    assert np.load(io.BytesIO(ours + bytes(4))).shape == shape
    assert parsed(ours).data_offset == len(ours)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [(shape, axis) for shape in [(5,), (3, 4), (2, 3, 4), (2, 3, 4, 5)] for axis in range(len(shape))],
)
def test_rows_along_every_axis_in_both_orders(put, shape, axis, order, size):
    array = sample("float32", shape)
    path = put("x.npy", npy_bytes(np.asarray(array, order=order)))
    rows, _ = read_blocks(path, size, axis)
    assert_same(rows, array.reshape(int(np.prod(shape[:axis])), -1))
    assert_same(read(path), array)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1, 1), (0,), (3, 0), (0, 3), (2, 0, 3)])
def test_fortran_order_where_it_makes_no_difference(put, shape):
    array = sample("float32", shape)
    path = put("x.npy", raw_npy(fields(shape=shape, fortran_order=True), array.tobytes()))
    assert_same(read(path), array)
    assert_same(np.load(path), array)


def test_big_endian_fortran_order(put):
    array = np.asarray(sample("float64", (4, 3, 2)).astype(">f8"), order="F")
    assert_same(read(put("x.npy", npy_bytes(array))), array)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L)}\n",
        "{'shape': (3, 4), 'descr': 'f4', 'fortran_order': False}",
        "  {'descr':\t'=f4',\n'fortran_order':False,'shape':(3,4,)}   \n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)}" + " " * 5000 + "\n",
    ],
)
def test_headers_of_other_writers(put, header):
    assert_same(read(put("x.npy", raw_npy(header, X.tobytes()))), X)


@pytest.mark.parametrize("length", [10_001, 65_535, 65_536])
def test_long_headers(put, length):
    header = repr(fields()).ljust(length - 1) + "\n"
    version = 1 if length < 1 << 16 else 2
    assert_same(read(put("x.npy", raw_npy(header, X.tobytes(), version))), X)


@pytest.mark.parametrize("length", [65_537, 1 << 20, (1 << 32) - 1])
def test_header_over_64_kib(put, length):
    start = b"\x93NUMPY\x02\x00" + length.to_bytes(4, "little")
    refused(put("x.npy", start + repr(fields()).encode()), length, "at most 65536")


def test_version_3_header_in_utf_8(put):
    header = "{'descr': [('größe', '<f4')], 'fortran_order': False, 'shape': (3,)}".encode()
    refused(put("x.npy", raw_npy(header, bytes(12), 3)), "structured", "größe")
    refused(put("bad.npy", raw_npy(b"\xff" + header, bytes(12), 3)), "malformed npy header")


@pytest.mark.parametrize("version", [0, 4, 255])
def test_unknown_version(put, version):
    refused(
        put("x.npy", raw_npy(fields(), X.tobytes(), version)), f"version {version}", "version 1, 2 or 3"
    )


@pytest.mark.parametrize("cut", [6, 7, 8, 9, 10, 11, 40, 127])
def test_truncated_header(put, cut):
    refused(put("x.npy", npy_bytes(X)[:cut]))


def test_truncated_header_counts(put):
    refused(put("x.npy", npy_bytes(X)[:50]), "truncated", "40 bytes of npy header", "118 bytes")


@pytest.mark.parametrize("kept", [0, 1, 47])
def test_truncated_data_counts(put, kept):
    refused(
        put("x.npy", npy_bytes(X)[: 128 + kept]),
        f"truncated: {kept} bytes of data",
        "48 bytes for float32 of shape (3, 4)",
    )


def test_surplus_bytes_are_a_warning(put):
    path = put("x.npy", npy_bytes(X) + b"abc")
    with open_tensor(str(path)) as tensor:
        assert_same(tensor.read(), X)
        assert tensor.warnings == [f"{path}: 3 surplus bytes after the tensor; ignored"]


MALFORMED = {
    "numpy 2 scalars": "{'descr': '<f4', 'fortran_order': False, 'shape': (np.int64(3), np.int64(4))}",
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "no descr": "{'fortran_order': False, 'shape': (3, 4)}",
    "one more key": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), 'x': 1}",
    "negative size": "{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 4)}",
    "True as a size": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}",
    "float as a size": "{'descr': '<f4', 'fortran_order': False, 'shape': (3.0, 4)}",
    "list as the shape": "{'descr': '<f4', 'fortran_order': False, 'shape': [3, 4]}",
    "number as the shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (3)}",
    "number as the order": "{'descr': '<f4', 'fortran_order': 0, 'shape': (3, 4)}",
    "number as the descr": "{'descr': 4, 'fortran_order': False, 'shape': (3, 4)}",
    "bytes as the descr": "{'descr': b'<f4', 'fortran_order': False, 'shape': (3, 4)}",
    "empty descr": "{'descr': '', 'fortran_order': False, 'shape': (3, 4)}",
    "unknown descr": "{'descr': '<f4,<f4', 'fortran_order': False, 'shape': (3, 4)}",
    "a call": "__import__('os').getpid()",
    "a list": "[1, 2]",
    "nothing": "",
    "spaces": " " * 100,
    "cut off": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4",
    "a null byte": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, \0 4)}",
    "non-ASCII bytes": "\xff\xfe\x80{'descr': '<f4'}",
    "nested brackets": "(" * 50_000,
    "nested signs": "-" * 50_000 + "1",
    "nested sums": "+".join("1" * 20_000),
    "nested dicts": "{1:" * 20_000,
    "unhashable key": "{[]: 1}",
    "digits without end": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 50_000 + ",)}",
    "hex digits without end": "{'descr': '<f4', 'fortran_order': False, 'shape': (0x"
    + "f" * 50_000
    + ",)}",
    "a huge order": "{'descr': '<f4', 'fortran_order': 0x" + "f" * 50_000 + ", 'shape': (3, 4)}",
    "a huge descr": "{'descr': 0x" + "f" * 50_000 + ", 'fortran_order': False, 'shape': (3, 4)}",
    "a huge field": "{'descr': [(0x"
    + "f" * 50_000
    + ", '<f4')], 'fortran_order': False, 'shape': (3, 4)}",
    "a huge element": "{'descr': '<f" + "9" * 50_000 + "', 'fortran_order': False, 'shape': (3, 4)}",
    "sizes beyond 64 bits": "{'descr': '<f4', 'fortran_order': False, 'shape': ("
    + "9" * 4000
    + ", "
    + "9" * 4000
    + ")}",
    "a size of 64 bits": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775808)}",
    "65 dimensions": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 65 + ")}",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_header(put, what):
    message = refused(put("x.npy", raw_npy(MALFORMED[what], X.tobytes())), "npy header")
    assert len(message) < 1000
    assert message.isprintable() or message.replace("\n", "").isprintable()


@pytest.mark.parametrize("version", [1, 2, 3])
@given(header=st.binary(max_size=80))
@quick
def test_random_header_is_refused(header, version):
    with pytest.raises(FormatError, match="malformed npy header"):
        parsed(raw_npy(header, version=version))


@given(place=st.integers(0, 127), byte=st.integers(0, 255))
@quick
def test_any_damage_is_read_or_refused(tmp_path_factory, place, byte):
    data = bytearray(npy_bytes(X))
    data[place] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(data)
    try:
        with open_tensor(str(path)) as tensor:
            assert tensor.read().shape == tensor.shape
    except LayernormError as error:
        checked(error, str(path))


def records():
    return np.zeros(3, [("mass", "<f4"), ("charge", "<f8")])


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.zeros(3, "<c8"), "complex64"),
        (np.zeros(3, "<c16"), "complex128"),
        (np.array(["abc"]), "<U3: strings"),
        (np.array([b"abc"]), "|S3: strings"),
        (np.array(["2020-01-01"], "<M8[D]"), "<M8[D]: dates"),
        (np.array([3], "<m8[ns]"), "<m8[ns]: time differences"),
        (np.zeros(3, "<f16"), "<f16"),
        (np.zeros(3, "<c32"), "complex256"),
        (np.zeros(3, "V3"), "|V3: not a number that layernorm reads"),
        (np.zeros(3, "V4"), "|V4: not a number that layernorm reads"),
        (records(), "mass, charge"),
        (np.zeros(3, [("pair", "<f4", (2,))]), "pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_dtypes_are_refused_by_name(put, array, shown):
    refused(put("x.npy", npy_bytes(array)), shown, "float32")


@pytest.mark.parametrize("descr", ["b", "f", "i", "?1", "b2", "f3", "i16", "b8", "x4", "<q"])
def test_other_descrs_are_refused(put, descr):
    refused(put("x.npy", raw_npy(fields(descr), bytes(192))), descr)


@pytest.mark.parametrize(
    ("descr", "name"), [("?", "bool"), ("|?", "bool"), ("b1", "bool"), ("i1", "int8"), (">i1", "int8")]
)
def test_other_names_of_known_dtypes(put, descr, name):
    array = sample(name, (3, 4))
    assert_same(read(put("x.npy", raw_npy(fields(descr), array.tobytes()))), array)


@pytest.mark.parametrize("descr", [[], [()], [5], ["ab"], [None, ("a", "<f4")], ("<f4", (2,)), ()])
def test_odd_structures_are_refused(put, descr):
    refused(put("x.npy", raw_npy(fields(descr), bytes(96))), "structured dtype")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("descr", ["|O", "O", "|O8", "O4"])
@pytest.mark.parametrize("shape", [(), (1,), (0,)])
def test_nothing_is_unpickled(put, tmp_path, descr, shape):
    payload = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    path = put("x.npy", raw_npy(fields(descr, shape), payload))
    refused(path, "dtype object", "pickles, which layernorm never loads")
    refused(path, "dtype object", assume="bfloat16")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(payload)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_numpys_own_pickles_are_refused(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.zeros(3, dtype), allow_pickle=True)
    refused(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
    ],
)
def test_raw_elements_need_assume_dtype(tmp_path, name, hint):
    array = sample(name)
    path = tmp_path / "x.npy"
    np.save(path, array)
    refused(path, "raw bytes", f"--assume-dtype {hint}")
    assert_same(read(path, name), array)


@pytest.mark.parametrize("descr", ["|V2", "<V2", "V2"])
def test_every_way_to_write_two_raw_bytes(put, descr):
    array = sample("bfloat16", (3, 4))
    path = put("x.npy", raw_npy(fields(descr), array.tobytes()))
    assert_same(read(path, "bfloat16"), array)
    assert_same(read(path, "float16"), array.view("<f2"))
    refused(path, "--assume-dtype bfloat16")


@pytest.mark.parametrize(("assume", "size"), [("float8_e5m2", 1), ("float32", 4), ("float64", 8)])
def test_assumed_dtype_of_another_size(put, assume, size):
    path = put("x.npy", raw_npy(fields("|V2"), bytes(24)))
    refused(path, "|V2", f"elements of {size} bytes for {assume}", assume=assume)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_unsigned_integers_may_be_assumed_floats(put, name):
    array = sample(name)
    unsigned = array.view(f"<u{array.dtype.itemsize}")
    assert_same(read(put("x.npy", npy_bytes(unsigned)), name), array)
    assert_same(read(put("x.npy", npy_bytes(unsigned))), unsigned)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_assumed_dtype_keeps_the_byte_order(put, name):
    array = sample(name)
    size = array.dtype.itemsize
    swapped = array.view(f"<u{size}").astype(f">u{size}")
    assert_same(read(put("x.npy", npy_bytes(swapped)), name), array)


@pytest.mark.parametrize("descr", [">u2", ">V2"])
def test_big_endian_bfloat16_is_refused(put, descr):
    path = put("x.npy", raw_npy(fields(descr), bytes(24)))
    refused(path, "big-endian", assume="bfloat16")


@pytest.mark.parametrize("name", ["float32", "int8", "bool"])
def test_assumed_dtype_does_not_touch_others(put, name):
    array = sample(name)
    assert_same(read(put("x.npy", npy_bytes(array)), "float8_e5m2"), array)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 29, 1 << 30), (1 << 20, 1 << 20, 1 << 19)])
@pytest.mark.parametrize("fortran_order", [False, True])
def test_huge_shape_allocates_nothing(put, shape, fortran_order):
    path = put("x.npy", raw_npy(fields(shape=shape, fortran_order=fortran_order), bytes(100)))
    tracemalloc.start()
    try:
        refused(path, "truncated: 100 bytes of data", f"{4 * math.prod(shape)} bytes")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(0, 1 << 62, 1 << 62), (0, 1 << 63), (1 << 60,), (1,) * 65])
def test_shape_that_numpy_cannot_hold(put, shape):
    refused(put("x.npy", raw_npy(fields(shape=shape), bytes(4))), "too large a shape", "64 dimensions")


@pytest.mark.parametrize("shape", [(0, (1 << 60) - 1), (1,) * 64])
def test_largest_shapes(put, shape):
    assert read(put("x.npy", raw_npy(fields("<f8", shape), bytes(8 * math.prod(shape))))).shape == shape


def test_a_name_is_refused(put):
    path = put("x.npy", npy_bytes(X))
    refused(f"{path}#x", "one tensor without a name", kind=UsageError)


def test_file_that_shrinks_while_it_is_read(put):
    path = put("x.npy", npy_bytes(X))
    with open_tensor(str(path)) as tensor:
        os.truncate(path, 140)
        with pytest.raises(FormatError) as caught:
            tensor.read()
    checked(caught.value, str(path), "truncated: the file ends at byte 140", "at least 176 bytes")


def test_nothing_stays_open(put, temporary_folder, no_descriptor_left):
    path = put("x.npy", npy_bytes(np.asfortranarray(sample("float32", (2, 3, 4)))))
    read(path)
    read(path)
    refused(put("bad.npy", npy_bytes(X)[:-1]))
    assert list(temporary_folder.iterdir()) == []


@given(
    shape=shapes,
    name=st.sampled_from(NUMPY_NAMES),
    order=st.sampled_from("<>"),
    fortran=st.booleans(),
    version=st.sampled_from(VERSIONS),
    seed=st.integers(0, 99),
)
@quick
def test_any_array_of_numpys(tmp_path_factory, shape, name, order, fortran, version, seed):
    array = sample(name, shape, seed)
    array = np.asarray(array.astype(array.dtype.newbyteorder(order)), order="F" if fortran else "C")
    path = tmp_path_factory.getbasetemp() / "any.npy"
    path.write_bytes(npy_bytes(array, version))
    assert_same(read(path), array)


@given(shape=shapes, name=st.sampled_from(NUMPY_NAMES), fortran=st.booleans())
@quick
def test_any_array_of_ours(tmp_path_factory, shape, name, fortran):
    array = np.asarray(sample(name, shape), order="F" if fortran else "C")
    path = tmp_path_factory.getbasetemp() / "any.npy"
    write(path, {"y": array}, force=True)
    assert_same(np.load(path), array)
    assert_same(read(path), array)
