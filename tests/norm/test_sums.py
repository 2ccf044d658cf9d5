import math
from fractions import Fraction

import numpy as np
import pytest

from layernorm_cli.norm.sums import sum_rows

from .oracle import assert_same_bits

WIDTHS = [*range(1, 20), 31, 32, 33, 255, 256, 257, 1000, 4097]


@pytest.mark.parametrize("width", WIDTHS)
def test_integers_are_summed_exactly(width):
    x = np.random.default_rng(width).integers(-(2**40), 2**40, (7, width))
    np.testing.assert_array_equal(sum_rows(x.astype(np.float64)), x.sum(axis=1))


@pytest.mark.parametrize("width", WIDTHS[:-1])
def test_each_element_counts_once(width):
    weights = np.arange(1.0, width + 1)
    np.testing.assert_array_equal(sum_rows(np.diag(weights)), weights)


@pytest.mark.parametrize("width", WIDTHS)
def test_error_grows_with_the_logarithm_of_the_width(width):
    x = np.random.default_rng(width).standard_normal((5, width)) + 0.1
    bound = (math.ceil(math.log2(width)) + 1) * 2.0**-53 * np.abs(x).sum(axis=1)
    truth = [sum(map(Fraction, row)) for row in x.tolist()]
    for total, exact, limit in zip(sum_rows(x).tolist(), truth, bound, strict=True):
        assert abs(Fraction(total) - exact) <= limit


def test_pairs_beat_a_running_sum():
    x = np.full((1, 2**20), 0.1)
    assert sum_rows(x)[0] == 0.1 * 2**20
    assert np.add.accumulate(x[0])[-1] != 0.1 * 2**20


@pytest.mark.parametrize("width", [1, 2, 3, 33, 1000])
def test_order_of_memory_and_other_rows_do_not_change_a_bit(width):
    x = np.random.default_rng(0).standard_normal((50, width))
    sums = sum_rows(x)
    assert_same_bits(sum_rows(np.asfortranarray(x)), sums)
    assert_same_bits(sum_rows(np.repeat(x, 2, axis=1)[:, ::2]), sums)
    assert_same_bits(np.concatenate([sum_rows(x[i : i + 1]) for i in range(50)]), sums)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_input_is_neither_changed_nor_shared(width):
    x = np.ones((3, width))
    sums = sum_rows(x)
    sums[:] = -1
    np.testing.assert_array_equal(x, np.ones((3, width)))


@pytest.mark.parametrize("width", [1, 8])
def test_no_rows_have_no_sums(width):
    assert sum_rows(np.empty((0, width))).shape == (0,)
