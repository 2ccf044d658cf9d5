import numpy as np
import pytest

from layernorm_cli.norm import row_pairs
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.norm.row_pairs import RowPairs, blocks, picked_rows, total

rng = np.random.default_rng(0)


def pairs_of(rows, width, residual=True, run=1, seen=None):
    x, more, y = rng.standard_normal((3, rows, width)).astype("f4")

    def read(start, stop):
        if seen is not None:
            seen.append((start, stop))
        return x[start:stop], more[start:stop] if residual else None, y[start:stop]

    dtype = DTYPES["float32"]
    return RowPairs((rows, width), 1, dtype, dtype, residual, read, run), x, more, y


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 5), (700, 100), (3, 50_000)])
@pytest.mark.parametrize("run", [1, 7, 1000])
def test_all_rows_in_order(rows, width, residual, run):
    seen = []
    pairs, x, more, y = pairs_of(rows, width, residual, run, seen)
    found = list(blocks(pairs))
    assert sum(len(block.x) for block in found) == rows == pairs.rows
    assert all(stop - start >= run or stop == rows for start, stop in seen)
    for block in found:
        assert block.x.dtype == np.float64
        assert block.x.size <= max(row_pairs.BLOCK_ELEMENTS, width)
        np.testing.assert_array_equal(block.x, x[block.numbers])
        np.testing.assert_array_equal(block.y, y[block.numbers])
        expected = x[block.numbers].astype("f8") + (more[block.numbers] if residual else 0)
        np.testing.assert_array_equal(total(block), expected)


@pytest.mark.parametrize("multiple", [1, 6, 5000])
def test_blocks_of_a_multiple(multiple):
    pairs, *_ = pairs_of(30_000, 4, run=7)
    found = list(blocks(pairs, multiple))
    assert len(found) > 1
    assert all(len(block.x) % multiple == 0 for block in found)


def test_picked_rows():
    pairs, x, more, y = pairs_of(20, 3)
    numbers = np.array([0, 1, 2, 7, 9, 10, 19])
    block = picked_rows(pairs, numbers)
    np.testing.assert_array_equal(block.numbers, numbers)
    for found, expected in ((block.x, x), (block.residual, more), (block.y, y)):
        np.testing.assert_array_equal(found, expected[numbers])


def test_rows_and_width():
    dtype = DTYPES["float32"]
    pairs = RowPairs((2, 3, 4, 5), 2, dtype, dtype, False, lambda a, b: None)
    assert (pairs.rows, pairs.width) == (6, 20)
