"""Batch normalization beside a layer norm: against long double over the whole matrix."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.norm.columns import add_rows, batch_row, no_rows
from layernorm_cli.norm.spec import make_norm

from .oracle import DISTRIBUTIONS, needs_extended, quick, rows_like


def truth(x, place, eps=1e-5, gamma=1, beta=0):
    """The row of the batch normalized matrix, two passes over all rows in long double."""
    x = np.asarray(x).astype(np.longdouble)
    mean = x[0] + (x - x[0]).mean(axis=0)
    centred = x - mean
    centred -= centred.mean(axis=0)
    var = (centred**2).mean(axis=0)
    y = centred[place] / np.sqrt(var + np.longdouble(eps)) * gamma + beta
    with np.errstate(over="ignore"):
        return mean.astype(float), var.astype(float), y.astype(float)


def streamed(x, place, step, eps=1e-5, gamma=None, beta=None):
    moments = no_rows(x[0])
    for start in range(0, len(x), step):
        moments = add_rows(moments, x[start : start + step])
    return batch_row(x[place].astype(np.float64), moments, make_norm("layer", eps, gamma, beta))


def test_worked_by_hand():
    batch = streamed(np.array([[1.0, 5], [3, 5], [8, 5]]), 2, 2, eps=0)
    assert (batch.rows, batch.mean.tolist(), batch.var[1]) == (3, [4, 5], 0)
    assert batch.var[0] == pytest.approx((9 + 1 + 16) / 3, rel=1e-15)
    assert batch.y[0] == pytest.approx(4 / np.sqrt(26 / 3), rel=1e-15)
    assert np.isnan(batch.y[1])  # 0 / 0
    assert streamed(np.array([[1.0, 5], [3, 5]]), 0, 2, beta=[0, 3]).y[1] == 3


@needs_extended
@pytest.mark.parametrize("step", [1, 7, 100, 1000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_against_long_double(name, step):
    x = rows_like(name, 300, 6)
    gamma, beta = rows_like("normal", 2, 6, seed=1)
    batch = streamed(x, 17, step, 1e-5, gamma, beta)
    mean, var, y = truth(x, 17, 1e-5, gamma, beta)
    np.testing.assert_allclose(batch.mean, mean, 1e-15, 1e-15 * np.sqrt(var.max()))
    np.testing.assert_allclose(batch.var, var, 1e-13)
    np.testing.assert_allclose(batch.y, y, 1e-13, 1e-14)


@needs_extended
@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e307])
def test_squares_out_of_range(scale):
    x = rows_like("normal", 50, 3)
    x[:, 1:] *= scale  # beside a column that is not
    np.testing.assert_allclose(streamed(x, 4, 8, 0).y, truth(x, 4, 0)[2], 1e-12)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
@quick
def test_blocks_make_no_difference(rows, step, seed):
    x = rows_like("mean 1e6, sd 0.1", rows, 3, seed)
    whole, parts = streamed(x, rows - 1, rows), streamed(x, rows - 1, step)
    np.testing.assert_allclose(parts.y, whole.y, 1e-12, 1e-13)
    assert parts.rows == rows


def test_a_nan_is_its_columns_own():
    x = rows_like("normal", 9, 4)
    x[0, 0], x[5, 1], x[8, 2] = np.nan, np.inf, -np.inf
    for step in (1, 4, 9):
        batch = streamed(x, 3, step)
        assert np.isnan(batch.y).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", ["f2", "f4", ml_dtypes.bfloat16, "i8", "?"])
def test_any_dtype(dtype):
    x = (10 * rows_like("normal", 30, 4)).astype(dtype)
    np.testing.assert_allclose(streamed(x, 1, 8).y, truth(x, 1)[2], 1e-13, 1e-14)
