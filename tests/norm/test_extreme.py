import math

import numpy as np
import pytest

from layernorm_cli.norm.extreme import standardize_extreme

from .oracle import FINITE_ROWS, assert_same_bits, exact_norms, exact_stats, rows_like, ulp_errors

KINDS = ("layer", "rms")


def standardized(x, kind="layer", eps=1e-5):
    x = np.array(x, np.float64)
    with np.errstate(all="ignore"):
        return x, standardize_extreme(x, kind, eps)


@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-300, 1e-5, 1e300, 1.7976931348623157e308])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FINITE_ROWS)
@pytest.mark.parametrize("width", [1, 2, 13])
def test_rows_and_statistics_are_right(width, name, kind, eps):
    rows = rows_like(name, 2, width)
    x, stats = standardized(rows, kind, eps)
    truth = exact_norms(rows, eps, kind)
    np.testing.assert_array_equal(np.isnan(x), np.isnan(truth))
    assert (np.isnan(truth) | (ulp_errors(x, truth) <= 4.5)).all()
    for i, row in enumerate(rows):
        mean, var, rstd = exact_stats(row, eps, kind)
        np.testing.assert_allclose(stats.mean[i], mean, rtol=0, atol=2 * math.ulp(np.abs(row).max()))
        np.testing.assert_allclose(stats.var[i], var, rtol=2e-15, atol=5e-324)
        np.testing.assert_allclose(stats.rstd[i], math.inf if math.isnan(rstd) else rstd, rtol=2e-15)
    assert not stats.nonfinite.any()


@pytest.mark.parametrize("value", [0.1, -1e200, 5e-324, 1.7976931348623157e308, 0.0])
def test_constant_row_is_zero_or_without_eps_nan(value):
    row = np.full((1, 7), value)
    x, stats = standardized(row)
    np.testing.assert_array_equal(x, np.zeros((1, 7)))
    assert (stats.mean[0], stats.var[0]) == (value, 0)
    x, stats = standardized(row, eps=0)
    assert np.isnan(x).all()
    assert (stats.mean[0], stats.var[0], stats.rstd[0]) == (value, 0, math.inf)


def test_constant_row_of_rms_norm_is_one():
    x, stats = standardized(np.full((1, 7), 1e200), "rms", 0)
    np.testing.assert_allclose(x, 1, rtol=4e-16)
    assert stats.var[0] == math.inf


def test_variance_beyond_float64_is_inf_and_rstd_still_right():
    x, stats = standardized([[3e200, -3e200]], eps=0)
    np.testing.assert_allclose(x, [[1, -1]], rtol=4e-16)
    assert stats.var[0] == math.inf
    np.testing.assert_allclose(stats.rstd, 1 / 3e200, rtol=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_row_is_nan_and_others_are_not(kind, value):
    x, stats = standardized([[1, 2, 3], [1, value, 3], [1e200, 0, -1e200]], kind)
    np.testing.assert_array_equal(np.isnan(x), [[False] * 3, [True] * 3, [False] * 3])
    np.testing.assert_array_equal(stats.nonfinite, [False, True, False])
    np.testing.assert_array_equal(np.isnan(stats.rstd), stats.nonfinite)
    np.testing.assert_array_equal(np.isnan(stats.var), stats.nonfinite)
    np.testing.assert_array_equal(np.isfinite(stats.mean), ~stats.nonfinite)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 5, 40])
def test_other_rows_do_not_change_a_bit(width, kind):
    rows = np.concatenate([rows_like(name, 1, width) for name in FINITE_ROWS])
    x, stats = standardized(rows, kind)
    for i in range(len(rows)):
        alone, alone_stats = standardized(rows[i : i + 1], kind)
        assert_same_bits(x[i : i + 1], alone)
        for field in ("mean", "var", "rstd", "nonfinite"):
            assert_same_bits(getattr(stats, field)[i : i + 1], getattr(alone_stats, field))
