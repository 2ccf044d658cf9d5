import math
from fractions import Fraction

import numpy as np
import pytest

from layernorm_cli.norm.sums import add_exactly, row_dots, sum_rows, work_space

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


def test_what_an_addition_rounds_off_is_kept():
    total, lost = np.zeros(3), np.zeros(3)
    parts = np.random.default_rng(3).standard_normal((500, 3)) * [1, 1e12, 1e-12]
    parts[::7] *= 1e9
    for part in parts:
        add_exactly(total, lost, part)
    truth = [float(sum(map(Fraction, column))) for column in parts.T.tolist()]
    np.testing.assert_allclose(total + lost, truth, 1e-15)


@pytest.mark.parametrize("width", [1, 8, 31, 32, 33, 500, 4097, 9000])
def test_dots_of_rows(width):
    work = work_space(7, width)
    work[...] = np.random.default_rng(width).standard_normal((7, width))
    other = np.random.default_rng(1).standard_normal((7, width))
    dot, squares = row_dots(work)
    for found, right in ((dot(work, other), other), (squares(work, work), work)):
        truth = [
            float(sum(Fraction(a) * Fraction(b) for a, b in zip(*rows, strict=True)))
            for rows in zip(work.tolist(), right.tolist(), strict=True)
        ]
        np.testing.assert_allclose(found.astype(np.float64), truth, 1e-13, 1e-13)


def test_empty_rows_have_sum_0():
    np.testing.assert_array_equal(sum_rows(np.empty((3, 0))), np.zeros(3))
