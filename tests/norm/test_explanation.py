"""The steps of a row: hand-worked numbers, exact arithmetic, layer_norm's own bits, derivatives."""

import math
from fractions import Fraction

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli import explain, layer_norm, row_stats
from layernorm_cli.errors import UsageError
from layernorm_cli.norm.explanation import flat_index

from .oracle import FINITE_ROWS, ROWS, assert_same_bits, exact_stats, quick, rows_like

WORKED = [2, 6, -2, 4]
GAMMA, BETA = [0.5, 2, 1, 0.8], [0.1, -0.5, 0, 0.3]
KINDS = ["layer", "rms"]
SPREAD = ["normal", "mean 1e4", "mean 1e6, sd 0.1", "one feature x 3000", "x 1e-4", "x 1e20"]


def test_worked_by_hand():
    steps = explain([WORKED], eps=0)
    assert (steps.row, steps.mean, steps.var, steps.eps) == ((0,), 2.5, 8.75, 0)
    assert steps.centred.tolist() == [-0.5, 3.5, -4.5, 1.5]
    assert steps.squared.tolist() == [0.25, 12.25, 20.25, 2.25]
    assert steps.std == math.sqrt(8.75)
    assert steps.y.round(4).tolist() == [-0.1690, 1.1832, -1.5213, 0.5071]
    assert steps.y.tolist() == steps.xhat.tolist()
    assert (steps.eps_effect.var_ratio, steps.eps_effect.shrink_percent) == (1, 0)
    assert (steps.gamma_values, steps.beta_values, steps.grad, steps.compare_axis) == (None,) * 4


def test_worked_by_hand_with_gamma_and_beta():
    steps = explain([WORKED], gamma=GAMMA, beta=BETA, eps=0)
    assert steps.y.round(4).tolist() == [0.0155, 1.8664, -1.5213, 0.7057]
    assert steps.gamma_values.tolist() == GAMMA
    assert explain([WORKED], gamma=GAMMA, gamma_offset=1).gamma_values.tolist() == [1.5, 3, 2, 1.8]


def test_rms_worked_by_hand():
    steps = explain([WORKED], eps=1, kind="rms")
    assert (steps.mean, steps.var, steps.std) == (2.5, 15, 4)
    assert (steps.centred.tolist(), steps.xhat.tolist()) == (WORKED, [0.5, 1.5, -0.5, 1])
    assert steps.eps_effect == (15 / 16, 100 / 16)


@given(
    st.sampled_from(sorted(ROWS)),
    st.sampled_from([1, 2, 3, 31, 32, 33, 200]),
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 1e-12, 1e-5, 1.0]),
    st.booleans(),
    st.integers(-3, 2),
)
@quick
def test_y_has_the_bits_of_layer_norm(name, width, kind, eps, learned, row):
    x = rows_like(name, 3, width)
    gamma, beta = rows_like("normal", 2, width, seed=1) if learned else (None, None)
    steps = explain(x, row, gamma, beta, eps, kind=kind)
    assert_same_bits(steps.y, layer_norm(x, gamma, beta, eps, kind=kind)[row])
    stats = row_stats(x, eps, kind=kind)
    found = np.array([steps.mean, steps.var, steps.rstd])
    assert_same_bits(found, np.array([stats.mean[row], stats.var[row], stats.rstd[row]]))
    made = steps.xhat if gamma is None else steps.xhat * gamma + beta
    assert_same_bits(made, steps.y)
    ratios = [steps.eps_effect.var_ratio, *(point.var_after for point in steps.sweep)]
    assert all(0 <= ratio <= 1 or math.isnan(ratio) for ratio in ratios)
    assert [point.var_after for point in steps.sweep if point.eps == eps] == pytest.approx(
        [steps.eps_effect.var_ratio], nan_ok=True, abs=0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPREAD)
def test_steps_are_exact(name, kind):
    (row,) = rows_like(name, 1, 57)
    steps = explain(row, kind=kind)
    mean, var, rstd = exact_stats(row, kind=kind)
    assert [steps.mean, steps.var, steps.rstd] == pytest.approx([mean, var, rstd], rel=1e-14, abs=0)
    assert steps.std == pytest.approx(1 / rstd, rel=1e-14)
    values = [Fraction(v) for v in row.tolist()]
    middle = sum(values) / 57 if kind == "layer" else 0
    centred = [float(v - middle) for v in values]
    np.testing.assert_allclose(steps.centred, centred, 1e-14, 1e-15 * math.sqrt(var))
    np.testing.assert_allclose(steps.squared, np.square(centred), 1e-13, 1e-15 * var)
    np.testing.assert_allclose(steps.xhat, steps.centred / steps.std, 1e-14, 1e-15)


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5, 1e-3, 0.5])
def test_eps_effect_is_that_of_the_var_of_xhat(eps):
    (row,) = rows_like("x 1e-4", 1, 40)
    steps = explain(row, eps=eps)
    var = Fraction(exact_stats(row)[1])
    exact = var / (var + Fraction(eps))
    assert steps.eps_effect.var_ratio == pytest.approx(float(exact), rel=1e-14, abs=0)
    assert steps.eps_effect.shrink_percent == pytest.approx(float(100 * (1 - exact)), rel=1e-13, abs=0)
    assert [point.eps for point in steps.sweep] == sorted({0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, eps})
    for point in steps.sweep:
        measured = exact_stats(layer_norm(row, eps=point.eps))[1]
        assert point.var_after == pytest.approx(measured, rel=1e-13, abs=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FINITE_ROWS)
def test_without_eps_a_factor_changes_nothing(name, kind):
    steps = explain(rows_like(name, 2, 9), 1, eps=0, kind=kind)
    change = steps.scaled.max_abs_change
    assert change == 0 or np.isnan(steps.y).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "eps"), [("x 1e-4", 1e-5), ("normal", 1e-3), ("mean 1e4", 0.1)])
def test_with_eps_a_factor_changes_y(name, eps, kind):
    (row,) = rows_like(name, 1, 64)
    gamma = rows_like("normal", 1, 64, seed=2)[0]
    steps = explain(row, gamma=gamma, eps=eps, kind=kind)
    scaled = layer_norm(40 * row, gamma, eps=eps, kind=kind)
    change = np.abs(scaled - layer_norm(row, gamma, eps=eps, kind=kind)).max()
    assert steps.scaled.factor == 40
    assert steps.scaled.max_abs_change == pytest.approx(change, rel=1e-8, abs=1e-13)
    ratio = explain(40 * row, eps=eps, kind=kind).eps_effect.var_ratio
    assert steps.scaled.var_after == pytest.approx(ratio, rel=1e-13)


def complex_step(row, j, eps, kind, gamma):
    """d y / d x_j with 60 digits: the imaginary part of y where x_j has a tiny one."""
    with mpmath.workdps(60):
        step = mpmath.mpf(10) ** -45 * max(abs(float(v)) for v in row)
        x = [mpmath.mpc(float(v), step if i == j else 0) for i, v in enumerate(row)]
        mean = sum(x) / len(x) if kind == "layer" else 0
        centred = [v - mean for v in x]
        root = mpmath.sqrt(sum(v * v for v in centred) / len(x) + mpmath.mpf(eps))
        return np.array([float((c / root * g).imag / step) for c, g in zip(centred, gamma, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 5, 40])
@pytest.mark.parametrize("name", [*SPREAD, "x 1e200"])
def test_grad_is_the_derivative(name, width, kind):
    (row,) = rows_like(name, 1, width)
    gamma = rows_like("normal", 1, width, seed=3)[0].tolist()
    for j in {0, width // 3, width - 1}:
        steps = explain(row, gamma=gamma, kind=kind, grad=j)
        truth = complex_step(row, j, 1e-5, kind, gamma)
        np.testing.assert_allclose(steps.grad, truth, 1e-12, 1e-13 * steps.rstd)
        assert steps.grad_feature == j


@given(st.sampled_from(FINITE_ROWS), st.integers(1, 70), st.sampled_from([0.0, 1e-5, 2.0]), st.data())
@quick
def test_each_column_of_the_jacobian_sums_to_0(name, width, eps, data):
    j = data.draw(st.integers(-width, width - 1))
    steps = explain(rows_like(name, 1, width), eps=eps, grad=j)
    if np.isfinite(steps.y).all() and math.isfinite(steps.rstd):
        assert abs(steps.grad.sum()) <= 1e-13 * steps.rstd


def test_every_feature_moves():
    steps = explain(rows_like("normal", 1, 33), grad=5)
    assert np.count_nonzero(steps.grad) == 33
    assert steps.grad.argmax() == 5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_with_what_is_no_number(value):
    steps = explain([[1, value, 2], [1, 2, 3]], grad=0)
    assert math.isnan(steps.var)
    for values in (steps.xhat, steps.y, steps.grad):
        assert np.isnan(values).all()
    assert math.isnan(steps.eps_effect.var_ratio)
    assert not any(short.eps_survives or short.var_overflows for short in steps.dtypes)


def test_constant_rows():
    steps = explain(np.full((1, 5), 0.1), beta=[*BETA, 7])
    assert (steps.mean, steps.var, steps.y.tolist()) == (0.1, 0, [*BETA, 7])
    assert (steps.centred.tolist(), steps.eps_effect) == ([0] * 5, (0, 100))
    steps = explain(np.full((1, 5), 0.1), eps=0)
    assert np.isnan(steps.y).all()
    assert math.isnan(steps.eps_effect.var_ratio)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_rows_whose_squares_are_out_of_range(scale):
    plain, steps = explain(WORKED, eps=0), explain(np.multiply(WORKED, scale), eps=0)
    np.testing.assert_allclose(steps.y, plain.y, 1e-14)
    assert steps.std == pytest.approx(plain.std * scale, rel=1e-14)
    assert steps.var == (0 if scale < 1 else math.inf)
    assert steps.eps_effect == (1, 0)


@pytest.mark.parametrize("dtype", ["f2", "f4", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i4", ">f4"])
def test_any_dtype(dtype):
    steps = explain(np.array([WORKED]).astype(dtype), eps=0)
    assert (steps.x.dtype, steps.x.tolist(), steps.var) == (np.float64, WORKED, 8.75)


def test_rows_over_several_axes():
    x = np.random.default_rng(0).normal(0, 1, (2, 3, 4, 5))
    steps = explain(x, (1, -2), axis=-2, grad=(2, 1), compare_axis=True)
    assert steps.row == (1, 1)
    assert_same_bits(steps.y, layer_norm(x, axis=-2)[1, 1].reshape(-1))
    assert steps.grad_feature == 11
    matrix = x.reshape(6, 20)
    batch = (matrix - matrix.mean(axis=0)) / np.sqrt(matrix.var(axis=0) + 1e-5)
    np.testing.assert_allclose(steps.compare_axis.y, batch[4], 1e-12, 1e-14)


def test_a_single_row_has_no_index():
    assert explain(WORKED).row == ()
    assert explain(WORKED, -1).y.tolist() == explain(WORKED, []).y.tolist()


@pytest.mark.parametrize("index", [0, 5, 47, -1, -48, (0, 0), (1, 23), (-1, -24), (-2, 5), np.int64(9)])
def test_indices_are_those_of_numpy(index):
    places = np.arange(48).reshape(2, 24)
    expected = places[index] if isinstance(index, tuple) else places.reshape(-1)[index]
    assert flat_index(index, (2, 24), "row") == expected


@pytest.mark.parametrize(
    ("index", "shape", "mentions"),
    [
        (48, (2, 24), "row 48: out of range\n  expected: -48 to 47"),
        (-49, (2, 24), "-48 to 47"),
        ((2, 0), (2, 24), "row 2,0: out of range\n  expected: -2 to 1, -24 to 23"),
        ((0, -25), (2, 24), "-24 to 23"),
        ((0, 0, 0), (2, 24), "3 indices\n  expected: the number of a row, or 2 indices"),
        ((), (2, 24), "0 indices"),
        (0, (0, 4), "there are no rows"),
        (1, (), "-1 to 0"),
    ],
)
def test_indices_out_of_range(index, shape, mentions):
    with pytest.raises(UsageError) as caught:
        flat_index(index, shape, "row")
    assert mentions in str(caught.value)


def test_indices_that_are_none():
    with pytest.raises(TypeError):
        explain([WORKED], 0.5)
