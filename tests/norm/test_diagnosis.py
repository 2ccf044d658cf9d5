"""Samples, statistics of columns in blocks, and what must hold on all rows."""

import ml_dtypes
import numpy as np
import pytest

from layernorm_cli import verify
from layernorm_cli.norm import diagnosis, row_pairs
from layernorm_cli.norm.closeness import closeness
from layernorm_cli.norm.deviation import no_deviation
from layernorm_cli.norm.diagnosis import diagnose, sample_rows
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.norm.row_pairs import RowPairs
from layernorm_cli.norm.variants import Stated

rng = np.random.default_rng(0)
FLOAT64 = DTYPES["float64"]


def norm(x, less=0, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, ddof=less, keepdims=True) + eps)


def pairs_of(x, y, run=1):
    return RowPairs(x.shape, 1, FLOAT64, FLOAT64, False, lambda a, b: (x[a:b], None, y[a:b]), run)


@pytest.fixture
def small(monkeypatch):
    """Samples and blocks of few rows, as of a large file."""
    monkeypatch.setattr(diagnosis, "SAMPLE_ELEMENTS", 400)
    monkeypatch.setattr(diagnosis, "SCREEN_ELEMENTS", 100)
    monkeypatch.setattr(row_pairs, "BLOCK_ELEMENTS", 700)
    monkeypatch.setattr(row_pairs, "READ_ELEMENTS", 1400)


@pytest.mark.parametrize("run", [1, 8, 1000])
def test_a_sample_is_spread_and_has_the_special_rows(run, small):
    x = rng.standard_normal((1000, 10))
    x[[5, 500]] = np.nan
    found = no_deviation(10)._replace(worst=((True, 1.0, 123),), flattest=((0.1, 777), (0.2, 5)))
    sample = sample_rows(pairs_of(x, x, run), found)
    numbers = sample.numbers
    assert {123, 777} <= set(numbers.tolist())
    assert not {5, 500} & set(numbers.tolist())
    assert 38 <= len(numbers) <= 50
    assert (np.diff(numbers) > 0).all()
    assert numbers[0] < 50
    assert numbers[-1] > 900
    np.testing.assert_array_equal(sample.x, x[numbers])


def test_an_explanation_must_hold_on_all_rows(small):
    x = rng.standard_normal((1000, 10))
    y = norm(x, less=1)
    verdict = verify(x, y)
    assert (verdict.best, verdict.tried_rows < 60) == ("unbiased variance (d - 1)", True)
    y[501:505] = norm(x[501:505])
    verdict = verify(x, y)
    assert (verdict.match, verdict.best) == (False, None)
    assert "not all: unbiased variance (d - 1)" in verdict.notes[0]


@pytest.mark.parametrize("shape", [(700, 10), (70, 10, 10), (7, 5, 20, 10)])
def test_statistics_of_columns_do_not_depend_on_blocks(shape, small):
    x = 3 + rng.standard_normal(shape) * rng.standard_normal(shape[-1])
    leading = tuple(range(len(shape) - 1))
    for axes, name in (
        (leading, "normalized over axis 0 (batch norm)"),
        ((0,), "normalized over axis 0 alone"),
        ((*leading, len(leading)), "normalized over all axes"),
    ):
        if axes == (0,) and len(shape) == 2:
            continue
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        verdict = verify(x, (x - mean) / np.sqrt(var + 1e-5))
        assert verdict.best == name
        assert verdict.variants[0].max_abs_error < 1e-13


def test_a_nan_in_x_is_no_obstacle():
    x = rng.standard_normal((50, 10))
    x[7, 3] = np.nan
    verdict = verify(x, norm(x, less=1))
    assert (verdict.best, verdict.nonfinite_rows) == ("unbiased variance (d - 1)", 1)
    y = norm(x)
    y[7] = 0
    verdict = verify(x, y)
    assert (verdict.match, verdict.best, verdict.wrong_rows, verdict.variants) == (False, None, 1, ())


@pytest.mark.parametrize("sd", [1e-4, 1e-2, 1, 100])
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 0.03])
def test_eps_is_inferred_where_the_rows_tell_it(sd, eps):
    x = (sd * rng.standard_normal((60, 40)) * np.exp(rng.standard_normal((60, 1)))).astype("f4")
    y = norm(x.astype("f8"), eps=eps).astype("f4")
    verdict = verify(x, y, eps=eps)
    assert verdict.match
    told = eps > 3e-6 * np.square(sd)
    hidden = eps < 3e-9 * np.square(sd)
    if told:
        assert verdict.inferred_eps == pytest.approx(eps, rel=0.1)
    if hidden:
        assert verdict.inferred_eps is None


def test_a_hundredth_of_the_tolerance_is_not_looked_into():
    x = rng.standard_normal((20, 10))
    y = norm(x)
    stated = Stated("layer", 1e-5, None, None, 0, False, FLOAT64)
    answer = diagnose(pairs_of(x, y), stated, closeness(FLOAT64, FLOAT64, 10), no_deviation(10))
    assert (answer.best, answer.ranked) == (None, ())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_few_digits_are_given_the_benefit_of_the_doubt(dtype):
    x = rng.standard_normal((60, 64)).astype(dtype)
    wide = x.astype("f8")
    right, wrong = (norm(wide, less).astype(dtype) for less in (0, 1))
    assert verify(x, right).notes == ()
    verdict = verify(x, wrong)
    if verdict.match:
        assert "nearer to: unbiased variance (d - 1)" in verdict.notes[0]
    else:
        assert verdict.best == "unbiased variance (d - 1)"
    assert verdict.match == (dtype != np.float16)


def test_no_rows():
    x = np.empty((0, 4))
    verdict = verify(x, x)
    assert verdict.match
    assert (verdict.rows, verdict.exact_fraction, verdict.inferred_eps) == (0, 1, None)
