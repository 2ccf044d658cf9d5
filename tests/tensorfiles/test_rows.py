"""Row sources: the same rows whatever the source, the axis and the size of the blocks."""

import contextlib
import itertools
import math
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError
from layernorm_cli.tensorfiles import rows
from layernorm_cli.tensorfiles.rows import (
    ColumnRows,
    FileRows,
    PipeRows,
    bytes_of,
    fits_numpy,
    fortran_row,
    split,
    to_c_order,
)

from .conftest import assert_same, checked, pipe_of, quick, sample

DTYPES_OF_SIZES = ["float64", "float32", "bfloat16", "float8_e4m3fn", "bool"]
PREFIX = b"header"


@contextlib.contextmanager
def opened(folder, data):
    path = folder / "rows"
    path.write_bytes(PREFIX + data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def source_of(kind, array, folder):
    """A source of the rows of a matrix."""
    data = array.T.tobytes() if kind == "columns" else array.tobytes()
    if kind == "pipe":
        with pipe_of(data) as reading:
            yield PipeRows(reading, array.dtype, *array.shape, "x", None)
    else:
        with opened(folder, data) as fd:
            make = ColumnRows if kind == "columns" else FileRows
            yield make(fd, len(PREFIX), array.dtype, *array.shape, "x")


KINDS = ["file", "columns", "pipe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["float64", "bfloat16", "bool"])
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    cuts=st.sets(st.integers(1, 11)),
    into=st.booleans(),
)
@quick
def test_blocks_of_any_size(tmp_path_factory, kind, name, shape, cuts, into):
    array = sample(name, shape)
    ends = [0, *sorted(cut for cut in cuts if cut < shape[0]), shape[0]]
    with source_of(kind, array, tmp_path_factory.getbasetemp()) as source:
        assert (source.rows, source.width) == shape
        assert source.sequential == (kind == "pipe")
        blocks = []
        for start, stop in itertools.pairwise(ends):
            block = np.empty((stop - start, shape[1]), array.dtype) if into else None
            found = source.read_rows(start, stop, block)
            assert block is None or found is block
            assert found.flags.c_contiguous
            blocks.append(found)
    assert_same(np.concatenate(blocks), array)


@pytest.mark.parametrize("kind", ["file", "columns"])
def test_blocks_in_any_order(tmp_path, kind):
    array = sample("float32", (10, 3))
    with source_of(kind, array, tmp_path) as source:
        for start, stop in [(7, 10), (0, 1), (3, 3), (0, 10), (2, 5)]:
            assert_same(source.read_rows(start, stop), array[start:stop])


def test_columns_are_read_in_good_pieces(tmp_path):
    with source_of("columns", sample("float32", (5, 3)), tmp_path) as source:
        assert source.least_rows * 3 * 4 == pytest.approx(rows.COLUMN_BLOCK_BYTES, rel=0.01)
    wide = ColumnRows(0, 0, np.dtype("f8"), 2, 1 << 40, "x")
    assert wide.least_rows == 1


@pytest.mark.parametrize("kind", ["file", "columns"])
def test_file_that_ends_early(tmp_path, kind):
    array = sample("float32", (10, 3))
    with source_of(kind, array, tmp_path) as source:
        os.truncate(tmp_path / "rows", len(PREFIX) + 119)
        assert_same(source.read_rows(0, 9), array[:9])
        with pytest.raises(FormatError) as caught:
            source.read_rows(9, 10)
    checked(caught.value, "x", "truncated", f"at least {len(PREFIX) + 120} bytes")


def test_pipe_that_ends_early():
    array = sample("float32", (10, 3))
    with pipe_of(array.tobytes()[:100]) as reading:
        source = PipeRows(reading, array.dtype, 10, 3, "x", None)
        assert_same(source.read_rows(0, 8), array[:8])
        with pytest.raises(FormatError) as caught:
            source.read_rows(8, 10)
    checked(caught.value, "x", "truncated: 100 bytes of data", "expected: 120 bytes")


@pytest.mark.parametrize("surplus", [0, 1, 1 << 17])
def test_surplus_in_a_pipe_is_counted(surplus):
    array = sample("float32", (10, 3))
    counts = []
    with pipe_of(array.tobytes() + bytes(surplus)) as reading:
        source = PipeRows(reading, array.dtype, 10, 3, "x", counts.append)
        assert_same(source.read_rows(0, 9), array[:9])
        assert counts == []
        assert_same(source.read_rows(9, 10), array[9:])
    assert counts == ([surplus] if surplus else [])


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((5,), 0, (1, 5)),
        ((2, 3, 4), 0, (1, 24)),
        ((2, 3, 4), 1, (2, 12)),
        ((2, 3, 4), 2, (6, 4)),
        ((0, 4), 1, (0, 4)),
        ((3, 0), 1, (3, 0)),
        ((), 0, (1, 1)),
    ],
)
def test_split(shape, axis, expected):
    assert split(shape, axis) == expected


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 3, 1, 4), (1, 2, 3, 2, 5)])
def test_fortran_row(tmp_path, shape, name):
    array = sample(name, shape)
    with opened(tmp_path, bytes(bytes_of(array.T))) as fd:
        leading = split(shape, len(shape) - 1)
        columns = ColumnRows(fd, len(PREFIX), array.dtype, *leading, "x")
        for axis in range(len(shape)):
            for index, row in enumerate(array.reshape(split(shape, axis))):
                assert_same(fortran_row(columns, shape, axis, index), row)


@pytest.mark.parametrize("name", DTYPES_OF_SIZES)
@pytest.mark.parametrize("block", [1, 40, 1 << 20])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (5, 3), (2, 3, 4), (4, 1, 3, 2), (2, 3, 1, 2, 2), (0, 3, 2), (2, 0, 3)]
)
def test_to_c_order(tmp_path, monkeypatch, shape, block, name):
    monkeypatch.setattr(rows, "COLUMN_BLOCK_BYTES", block)
    array = sample(name, shape)
    with opened(tmp_path, array.tobytes("F")) as fd, tempfile.TemporaryFile() as spool:
        to_c_order(fd, len(PREFIX), array.dtype, shape, "x", spool.fileno())
        assert spool.read() == array.tobytes("C")


def views():
    base = sample("float32", (6, 8))
    return {
        "whole": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "every second row": base[::2],
        "every second column": base[:, ::2],
        "one column": base[:, 3],
        "one column of two axes": base[:, 3:4],
        "backwards": base[::-1],
        "a column of bytes": base.view(np.uint8)[:, 1],
        "broadcast": np.broadcast_to(base[0], (3, 8)),
        "swapped axes": sample("bfloat16", (2, 3, 4)).swapaxes(0, 1),
        "no elements": base[:0],
        "no elements, strided": base[:0, ::2],
        "a scalar": base[0, 0].reshape(()),
        "a part": base[2:4, 3:5],
        "float8": sample("float8_e5m2", (4, 4)).T,
        "read-only": np.frombuffer(b"12345678", "<f4"),
    }


@pytest.mark.parametrize("what", views())
def test_bytes_of(what):
    array = views()[what]
    view = bytes_of(array)
    assert view.tobytes() == array.tobytes("C")
    assert (view.ndim, view.itemsize, view.contiguous) == (1, 1, True)


@pytest.mark.parametrize("shape", [(3, 4), (12,), (2, 0), ()])
@pytest.mark.parametrize("name", DTYPES_OF_SIZES)
def test_bytes_of_writes_through(name, shape):
    array = np.zeros_like(sample(name, shape))
    expected = sample(name, shape)
    bytes_of(array)[:] = expected.tobytes()
    assert_same(array, expected)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    steps=st.lists(st.sampled_from([1, 2, -1]), min_size=4, max_size=4),
    axes=st.permutations(range(4)),
    name=st.sampled_from(DTYPES_OF_SIZES),
)
@quick
def test_bytes_of_any_view(shape, steps, axes, name):
    array = sample(name, shape).transpose([axis for axis in axes if axis < len(shape)])
    view = array[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    assert bytes_of(view).tobytes() == view.tobytes("C")


@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 4), (1,) * 64, ((1 << 60) - 1,), (0, (1 << 60) - 1), (1 << 30, 1 << 29, 0)]
)
def test_fits_numpy(shape):
    assert fits_numpy(shape)
    if math.prod(shape) < 1000:
        assert np.empty(shape).shape == shape


@pytest.mark.parametrize("shape", [(1,) * 65, (1 << 60,), (0, 1 << 60), (1 << 30, 1 << 30), (0,) * 65])
def test_does_not_fit_numpy(shape):
    assert not fits_numpy(shape)
    with pytest.raises((ValueError, MemoryError)):
        np.empty(shape)


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_memory_in_another_order_is_not_read_into(kind, tmp_path):
    """Its bytes in order are a copy; to fill that would leave the block as it was."""
    array = np.arange(12, dtype="<f4").reshape(4, 3)
    with source_of(kind, array, tmp_path) as source, pytest.raises(ValueError, match="C-ordered"):
        source.read_rows(0, 4, np.empty((4, 3), "<f4", order="F"))
