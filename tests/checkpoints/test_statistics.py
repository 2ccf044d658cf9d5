"""What gamma and beta have learned, against numpy's own long double."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.checkpoints.statistics import outliers, stats_of, verdict_of
from layernorm_cli.checkpoints.survey import Parameters

from .families import found_in

ONES, ZEROS = np.ones(64), np.zeros(64)
RANDOM = np.random.default_rng(0).normal(1, 0.1, 64)


def site(offset=0):
    ((found,), _) = found_in({"ln.weight": [64], "ln.bias": [64]})
    return found._replace(gamma_offset=offset)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_stats(values):
    array = np.array(values)
    exact = array.astype(np.longdouble)
    stats = stats_of(array)
    np.testing.assert_allclose(stats.mean, float(exact.mean()), 1e-12, 1e-9)
    np.testing.assert_allclose(stats.std, float(exact.std()), 1e-9, 1e-9)
    np.testing.assert_allclose(stats.norm, float(np.sqrt((exact**2).sum())), 1e-12, 1e-150)
    assert (stats.min, stats.max) == (min(values), max(values))


def test_outliers_are_named():
    values = np.random.default_rng(0).normal(0, 1, 1000)
    values[[7, 400]] = 50, -60
    assert outliers(values).tolist() == [7, 400]
    assert stats_of(values).outliers == (7, 400)
    assert stats_of(ONES).outliers == ()


@pytest.mark.parametrize(
    ("gamma", "beta", "offset", "verdict"),
    [
        (ONES, ZEROS, 0, "identity"),
        (ONES, None, 0, "identity"),
        (ZEROS, None, 1, "identity"),
        (ZEROS, ZEROS, 0, "zero"),
        (-ONES, None, 1, "zero"),
        (ZEROS, RANDOM, 0, "zero"),
        (3 * ONES, ZEROS, 0, "constant"),
        (3 * ONES, ONES, 0, "constant"),
        (ONES, RANDOM, 0, "trained"),
        (RANDOM, ZEROS, 0, "trained"),
        (np.where(np.arange(64) == 3, np.nan, 1), ZEROS, 0, "nonfinite"),
        (ONES, np.where(np.arange(64) == 3, np.inf, 0), 0, "nonfinite"),
    ],
)
def test_verdicts(gamma, beta, offset, verdict):
    assert verdict_of(site(offset), Parameters(gamma, beta)) == verdict
