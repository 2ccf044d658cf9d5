"""safetensors headers and files, against the safetensors library."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError, InputError, LayernormError
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.tensorfiles.reader import open_tensor, read_safetensors
from layernorm_cli.tensorfiles.safetensors import (
    LARGEST_HEADER,
    read_safetensors_header,
    safetensors_header,
)

from .conftest import (
    X,
    assert_same,
    checked,
    entry,
    quick,
    raw_safetensors,
    read,
    read_blocks,
    refused,
    sample,
    shapes,
    write,
)

pytestmark = pytest.mark.usefixtures("no_descriptor_left")


def by_the_library(path):
    """Every tensor as the library reads it, float8 too, which its numpy functions cannot."""
    codes = {dtype.code: sample(name).dtype for name, dtype in DTYPES.items()}
    return {
        name: np.frombuffer(found["data"], codes[found["dtype"]]).reshape(found["shape"])
        for name, found in safetensors.deserialize(path.read_bytes())
    }


def header_of(path):
    with path.open("rb") as file:
        return read_safetensors(file.fileno(), str(path))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (3, 5), (2, 3, 4, 5)])
def test_reads_the_librarys(tmp_path, name, shape):
    array = sample(name, shape)
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": array, "other": X}, path)
    with open_tensor(f"{path}#a") as tensor:
        assert (tensor.dtype.name, tensor.shape, tensor.name) == (name, shape, "a")
        assert tensor.warnings == []
        assert tensor.ref == f"{path}#a"
    assert_same(read(f"{path}#a"), array)
    assert_same(read(f"{path}#other"), X)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (3, 5), (2, 3, 4, 5)])
def test_the_library_reads_ours(tmp_path, name, shape):
    array = sample(name, shape)
    path = tmp_path / "y.safetensors"
    write(path, {"y": array, "other": X}, {"tool": "größe"})
    found = by_the_library(path)
    assert found.keys() == {"y", "other"}
    assert_same(found["y"], array)
    assert_same(found["other"], X)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"tool": "größe"}
    assert_same(read(f"{path}#y"), array)


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("float8")])
def test_the_librarys_numpy_arrays(tmp_path, name):
    array = sample(name)
    write(tmp_path / "y.safetensors", {"y": array})
    found = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert_same(found["y"], array)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows(tmp_path, size, axis):
    array = sample("bfloat16", (2, 3, 4))
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": X, "b": array, "c": X}, path)
    rows, _ = read_blocks(f"{path}#b", size, axis)
    assert_same(rows, array.reshape(int(np.prod((2, 3, 4)[:axis])), -1))


def test_single_tensor_needs_no_name(put):
    path = put("x.safetensors", raw_safetensors({"a.b": entry()}, bytes(4)))
    with open_tensor(str(path)) as tensor:
        assert tensor.name == "a.b"


def test_empty_file_of_tensors(put):
    path = put("x.safetensors", raw_safetensors({}))
    refused(path, "no tensors in the file", kind=InputError)
    refused(f"{path}#a", "no tensor 'a'", kind=InputError)


@pytest.mark.parametrize("code", ["uint16", "uint8"])
def test_unsigned_integers_may_be_assumed_floats(tmp_path, code):
    names = {"uint16": ["bfloat16", "float16"], "uint8": ["float8_e4m3fn", "float8_e5m2"]}
    for name in names[code]:
        array = sample(name)
        write(tmp_path / "x.safetensors", {"x": array.view(code)}, force=True)
        assert_same(read(tmp_path / "x.safetensors", name), array)
        assert_same(read(tmp_path / "x.safetensors", "float32"), array.view(code))


def test_header_may_end_in_spaces(put):
    header = json.dumps({"a": entry()}).encode() + b" " * 1000
    assert_same(read(put("x.safetensors", raw_safetensors(header, X[0, :1].tobytes()))), X[0, :1])


def test_tensors_in_any_order_of_the_header(put):
    header = {"b": entry(offsets=(4, 8)), "empty": entry(shape=(0,), offsets=(4, 4)), "a": entry()}
    path = put("x.safetensors", raw_safetensors(header, np.array([1, 2], "<f4").tobytes()))
    assert list(header_of(path).entries) == ["b", "empty", "a"]
    assert (read(f"{path}#a"), read(f"{path}#b")) == (1, 2)
    assert read(f"{path}#empty").shape == (0,)


@pytest.mark.parametrize("name", ["größe", "a#b", "", "[red]x", "x" * 1000, "a\nb", '"', "\U0001f600"])
def test_odd_names(tmp_path, name):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({name: X, "other": -X}, path)
    assert_same(header_read(path, name), X)
    write(tmp_path / "y.safetensors", {name: X, "other": -X})
    assert_same(by_the_library(tmp_path / "y.safetensors")[name], X)
    if name:
        assert_same(read(f"{path}#{name}"), X)


def header_read(path, name):
    found = header_of(path).entries[name]
    return np.frombuffer(path.read_bytes(), "<f4", int(np.prod(found.shape)), found.offset).reshape(
        found.shape
    )


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"größe": "\U0001f600 \u2028", "": ""}])
def test_metadata(tmp_path, metadata):
    safetensors.numpy.save_file({"x": X}, tmp_path / "x.safetensors", metadata)
    header = header_of(tmp_path / "x.safetensors")
    assert (header.metadata, header.warnings) == (metadata, ())
    write(tmp_path / "y.safetensors", {"x": X}, metadata)
    with safetensors.safe_open(tmp_path / "y.safetensors", "numpy") as file:
        assert (file.metadata() or {}) == metadata


@pytest.mark.parametrize(
    "metadata", [None, 1, "text", [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": "b", "c": []}]
)
def test_odd_metadata_is_a_warning(put, metadata):
    path = put(
        "x.safetensors", raw_safetensors({"__metadata__": metadata, "x": entry()}, X[0, :1].tobytes())
    )
    with open_tensor(str(path)) as tensor:
        assert_same(tensor.read(), X[0, :1])
        assert tensor.warnings == [f"{path}: __metadata__ is not a map of strings to strings; ignored"]
    assert header_of(path).metadata == {}


@pytest.mark.parametrize(
    ("code", "shape", "size"),
    [
        ("F4", (2, 4), 4),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (4,), 3),
        ("F8_E8M0", (4,), 4),
        ("F8_E4M3FNUZ", (4,), 4),
        ("F8_E5M2FNUZ", (4,), 4),
        ("C64", (2,), 16),
        ("F128", (2,), 32),
    ],
)
def test_unknown_dtype_stops_only_its_own_tensor(put, code, shape, size):
    header = {"odd": entry(code, shape, (0, size)), "x": entry(offsets=(size, size + 4))}
    path = put("x.safetensors", raw_safetensors(header, bytes(size) + X[0, :1].tobytes()))
    assert_same(read(f"{path}#x"), X[0, :1])
    refused(f"{path}#odd", f"dtype {code} has no layer norm here", "F64, F32, F16, BF16, F8_E4M3")


ENTRY = json.dumps(entry()).encode()
MALFORMED = {
    "duplicate name": (b'{"a":%b,"a":%b}' % (ENTRY, ENTRY), "duplicate key 'a'"),
    "duplicate key in an entry": (b'{"a":{"dtype":"F32","dtype":"F32"}}', "duplicate key 'dtype'"),
    "duplicate key in metadata": (b'{"__metadata__":{"k":"","k":""}}', "duplicate key 'k'"),
    "not JSON": (b'{"a":', "not JSON at byte 13"),
    "not JSON, text": (b"{hello}", "not JSON at byte 9"),
    "trailing comma": (b'{"a":%b,}' % ENTRY, "not JSON"),
    "not JSON behind umlauts": ('{"größe":'.encode() + b"x}", "not JSON at byte 19"),
    "two values": (b"{} {}", "not JSON at byte 11"),
    "not UTF-8": (b'{"\xff":%b}' % ENTRY, "not UTF-8 at byte 10"),
    "UTF-16": ('{"a":1}'.encode("utf-16-be"), "begins b'\\x00{"),
    "a list": (b"[1, 2]", "begins b'[1, 2]'"),
    "a space": (b' {"a":%b}' % ENTRY, "begins b' {"),
    "NaN": (b'{"a":NaN}', "NaN"),
    "NaN in metadata": (b'{"__metadata__":{"a":NaN}}', "NaN"),
    "Infinity": (b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', "Infinity"),
    "-Infinity in metadata": (b'{"__metadata__":[-Infinity]}', "-Infinity"),
    "nested lists": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "nested objects": (b'{"a":' * 100_000, "nested too deeply"),
    "nested metadata": (b'{"__metadata__":' + b"[" * 99_999 + b"]" * 99_999 + b"}", "nested too deeply"),
    "number without end": (
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}',
        "digits",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_header(put, what):
    header, shown = MALFORMED[what]
    path = put("x.safetensors", raw_safetensors(header, bytes(4)))
    message = refused(path, shown)
    assert len(message) < 1000
    if what not in ("duplicate name", "a space"):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load_file(path)


ENTRIES = {
    "null": None,
    "list": [],
    "no dtype": {"shape": [1], "data_offsets": [0, 4]},
    "no shape": {"dtype": "F32", "data_offsets": [0, 4]},
    "no offsets": {"dtype": "F32", "shape": [1]},
    "dtype a number": {"dtype": 32, "shape": [1], "data_offsets": [0, 4]},
    "shape a number": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
    "shape null": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]},
    "negative size": entry(shape=(-1,)),
    "float size": entry(shape=(1.0,)),
    "true as a size": entry(shape=(True,)),
    "string size": entry(shape=("1",)),
    "negative offset": entry(offsets=(-4, 0)),
    "offsets swapped": entry(offsets=(4, 0)),
    "one offset": entry(offsets=(4,)),
    "three offsets": entry(offsets=(0, 4, 4)),
    "float offsets": entry(offsets=(0.0, 4.0)),
    "shape and offsets differ": entry(shape=(2,)),
    "dtype and offsets differ": entry("F64"),
    "half a byte": entry("F4", (7,)),
    "size beyond 64 bits": entry(shape=(10**30,)),
    "sizes beyond floats": entry(shape=(10**200, 10**200)),
    "empty with a huge size": entry(shape=(0, 10**30), offsets=(0, 0)),
    "65 dimensions": entry(shape=(1,) * 65),
    "offsets beyond 64 bits": entry(shape=(1,), offsets=(0, 10**30)),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_malformed_entry(put, what):
    header = {"bad": ENTRIES[what], "good": entry(shape=(0,), offsets=(4, 4))}
    path = put("x.safetensors", raw_safetensors(header, bytes(4)))
    message = refused(f"{path}#good")
    assert message.startswith(f"{path}#bad: ")
    assert "  expected: " in message
    assert len(message) < 1000


def test_one_more_key_in_an_entry(put):
    header = {"bad": entry() | {"comment": "no"}}
    refused(put("x.safetensors", raw_safetensors(header, bytes(4))), "#bad: malformed safetensors entry")


@pytest.mark.parametrize("code", ["F32", "F128"])
def test_swapped_offsets_of_any_dtype(put, code):
    path = put("x.safetensors", raw_safetensors({"a": entry(code, offsets=(4, 0))}, bytes(4)))
    refused(path, "#a: malformed data_offsets [4, 0]")


def test_size_mismatch_tells_both_sizes(put):
    path = put("x.safetensors", raw_safetensors({"a": entry(shape=(2, 3))}, bytes(4)))
    refused(path, "data_offsets span 4 bytes", "24 bytes for F32 of shape (2, 3)")


def test_size_mismatch_tells_every_digit(put):
    path = put("x.safetensors", raw_safetensors({"a": entry(shape=(1234567, 3))}, bytes(4)))
    refused(path, "14814804 bytes for F32")


def test_overlap(put):
    header = {"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(shape=(2,), offsets=(4, 12))}
    path = put("x.safetensors", raw_safetensors(header, bytes(12)))
    refused(path, "#b: its bytes overlap 4 bytes with 'a'", "data_offsets beginning at 8")


def test_the_same_bytes_twice(put):
    path = put("x.safetensors", raw_safetensors({"a": entry(), "b": entry()}, bytes(4)))
    refused(path, "#b: its bytes overlap 4 bytes with 'a'")


def test_hole(put):
    header = {"a": entry(), "b": entry(offsets=(8, 12))}
    path = put("x.safetensors", raw_safetensors(header, bytes(12)))
    refused(path, "#b: its bytes leave a hole of 4 bytes behind 'a'", "data_offsets beginning at 4")


def test_hole_before_the_first(put):
    path = put("x.safetensors", raw_safetensors({"a": entry(offsets=(4, 8))}, bytes(8)))
    refused(path, "#a: its bytes leave a hole of 4 bytes behind 'the header'")


@pytest.mark.parametrize(("surplus", "tensors"), [(1, {"a": entry()}), (5, {})])
def test_bytes_past_the_end(put, surplus, tensors):
    path = put("x.safetensors", raw_safetensors(tensors, bytes(5)))
    refused(path, f"{surplus} bytes past the end of the last tensor", f"{5 - surplus} bytes of data")


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_truncated_data(put, kept):
    path = put("x.safetensors", raw_safetensors({"a": entry()}, bytes(kept)))
    refused(
        path, f"truncated or incomplete: {kept} bytes of data", f"4 bytes, {4 - kept} more", "fetching"
    )


@pytest.mark.parametrize("kept", [8, 9, 40])
def test_truncated_header(put, kept):
    data = raw_safetensors({"a": entry()}, bytes(4))
    refused(
        put("x.safetensors", data[:kept]),
        f"truncated or incomplete: {kept} bytes, which end inside the header",
        f"{len(data) - 4} bytes up to the header's end",
    )


@pytest.mark.parametrize("kept", range(1, 8))
def test_truncated_length(put, kept):
    refused(
        put("x.safetensors", raw_safetensors({})[:kept]),
        f"truncated or incomplete: {kept} bytes",
        "8 bytes",
    )


def test_header_length_0(put):
    refused(put("x.safetensors", bytes(100)), "header length 0, in a file of 100 bytes", "incomplete")


@pytest.mark.parametrize("length", [LARGEST_HEADER + 1, 1 << 40, (1 << 64) - 1])
def test_header_length_beyond_the_limit(put, length):
    path = put("x.safetensors", raw_safetensors({}, length=length))
    refused(path, f"header length {length}, in a file of 10 bytes", f"at most {LARGEST_HEADER}")


def test_header_length_beyond_the_file_allocates_nothing(put):
    path = put("x.safetensors", raw_safetensors({}, length=LARGEST_HEADER))
    tracemalloc.start()
    try:
        refused(path, "which end inside the header", f"{LARGEST_HEADER + 8} bytes")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_huge_tensor_allocates_nothing(put):
    size = 1 << 50
    header = {"a": entry(shape=(size,), offsets=(0, 4 * size))}
    tracemalloc.start()
    try:
        refused(put("x.safetensors", raw_safetensors(header, bytes(4))), f"{4 * size - 4} more")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": X})
    with open_tensor(str(path)) as tensor:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(FormatError) as caught:
            tensor.read()
    checked(caught.value, str(path), "#x: truncated: the file ends at byte")


def test_header_of_our_writer():
    tensors = {
        "small": (DTYPES["float8_e5m2"], (3,)),
        "wide": (DTYPES["float64"], (2, 2)),
        "empty": (DTYPES["float32"], (0, 9)),
        "scalar": (DTYPES["bfloat16"], ()),
    }
    header, offsets, size = safetensors_header(tensors, {"eps": "1e-05"})
    assert len(header) % 8 == 0
    assert all(offsets[name] % tensors[name][0].itemsize == 0 for name in tensors)
    assert size == len(header) + 3 + 32 + 0 + 2
    parsed = read_safetensors_header(header[:8], size, header[8:], "y")
    assert parsed.metadata == {"eps": "1e-05"}
    assert {name: found.offset for name, found in parsed.entries.items()} == offsets
    assert {name: (found.code, found.shape) for name, found in parsed.entries.items()} == {
        name: (dtype.code, shape) for name, (dtype, shape) in tensors.items()
    }


@given(data=st.binary(max_size=200))
@quick
def test_random_header_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(raw_safetensors(b'{"' + data, bytes(4)))
    refused(path)


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@quick
def test_any_damage_is_read_or_refused(tmp_path_factory, place, byte):
    data = bytearray(safetensors.numpy.save({"a": X, "b": X.astype("<f2")}, {"key": "value"}))
    data[int(place * len(data))] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data)
    try:
        with open_tensor(f"{path}#b") as tensor:
            assert tensor.read().shape == tensor.shape
    except LayernormError as error:
        checked(error, str(path))


arrays = st.builds(sample, st.sampled_from([*DTYPES]), shapes, st.integers(0, 99))
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name != "__metadata__"
)


@given(st.dictionaries(names, arrays, min_size=1, max_size=4))
@quick
def test_any_tensors_both_ways(tmp_path_factory, tensors):
    theirs = tmp_path_factory.getbasetemp() / "theirs.safetensors"
    ours = tmp_path_factory.getbasetemp() / "ours.safetensors"
    safetensors.numpy.save_file(tensors, theirs)
    write(ours, tensors, {"kind": "layer"}, force=True)
    found = by_the_library(ours)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert_same(found[name], array)
        assert_same(read(f"{theirs}#{name}"), array)
        assert_same(read(f"{ours}#{name}"), array)


def test_bfloat16_values(put):
    """The bits of 1, -2, the largest bfloat16 and inf, as the format lays them down."""
    bits = np.array([0x3F80, 0xC000, 0x7F7F, 0x7F80], "<u2")
    path = put("x.safetensors", raw_safetensors({"x": entry("BF16", (4,), (0, 8))}, bits.tobytes()))
    found = read(path)
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(float).tolist() == [1, -2, 3.3895313892515355e38, np.inf]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("F8_E4M3", [1.0, -2.0, 448.0, 2.0**-9]),
        ("F8_E5M2", [0.0078125, -32.0, np.nan, 2.0**-16]),
    ],
)
def test_float8_values(put, code, values):
    bits = bytes((0x38, 0xC0, 0x7E, 0x01)) if code == "F8_E4M3" else bytes((0x20, 0xD0, 0x7E, 0x01))
    path = put("x.safetensors", raw_safetensors({"x": entry(code, (4,))}, bits))
    np.testing.assert_array_equal(read(path).astype(float), values)
