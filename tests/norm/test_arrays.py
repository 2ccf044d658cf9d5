import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layernorm_cli.errors import UsageError
from layernorm_cli.norm.arrays import layer_norm, normalized_axis, row_stats

from .oracle import (
    FINITE_ROWS,
    NONFINITE,
    assert_same_bits,
    exact_norm,
    exact_norms,
    exact_stats,
    extended_norm,
    needs_extended,
    quick,
    rows_like,
    thorough,
    ulp_errors,
)

KINDS = ("layer", "rms")
LARGEST = 1.7976931348623157e308
X = [[1.0, 2.0, 4.0], [10.0, 20.0, 60.0]]


def assert_within_4_ulp(y, truth):
    __tracebackhide__ = True
    np.testing.assert_array_equal(np.isnan(y), np.isnan(truth))
    defined = ~np.isnan(truth)
    np.testing.assert_array_less(ulp_errors(y[defined], truth[defined]), 4.5)


# Worked examples

ROW = [2, 6, -2, 4]
GAMMA = [0.5, 2, 1, 0.8]
BETA = [0.1, -0.5, 0, 0.3]
MATRIX = [
    [1.133, -0.299, 0.503],
    [-0.176, 0.911, 0.143],
    [0.766, 0.781, -0.518],
    [1.601, -0.669, 0.368],
    [0.663, 0.779, 0.648],
]
MATRIX_NORMALIZED = [
    [1.17, -1.27, 0.10],
    [-1.03, 1.36, -0.33],
    [0.69, 0.72, -1.41],
    [1.26, -1.19, -0.07],
    [-0.57, 1.40, -0.83],
]


def test_row_by_hand():
    y = layer_norm(ROW, eps=0)
    np.testing.assert_allclose(y, [-0.1690, 1.1832, -1.5213, 0.5071], rtol=0, atol=5e-5)
    root = math.sqrt(8.75)
    np.testing.assert_allclose(y, [-0.5 / root, 3.5 / root, -4.5 / root, 1.5 / root], rtol=1e-15)


def test_row_by_hand_with_gamma_and_beta():
    y = layer_norm(ROW, GAMMA, BETA, eps=0)
    np.testing.assert_allclose(y, [0.0155, 1.8664, -1.5213, 0.7057], rtol=0, atol=5e-5)
    assert_within_4_ulp(y, exact_norm(ROW, 0, "layer", GAMMA, BETA))


def test_statistics_by_hand():
    stats = row_stats([ROW], eps=0)
    assert (stats.mean[0], stats.var[0], stats.rstd[0]) == (2.5, 8.75, 1 / math.sqrt(8.75))
    stats = row_stats([ROW], eps=1, kind="rms")
    assert (stats.mean[0], stats.var[0], stats.rstd[0]) == (2.5, 15, 0.25)


def test_rms_by_hand():
    np.testing.assert_allclose(layer_norm([1, -7], eps=0, kind="rms"), [0.2, -1.4], rtol=4e-16)


def test_eps_is_added_to_var():
    np.testing.assert_array_equal(layer_norm([-4.0, 4.0], eps=9), [-0.8, 0.8])


def test_matrix_by_hand():
    y = layer_norm(MATRIX)
    np.testing.assert_allclose(y, MATRIX_NORMALIZED, rtol=0, atol=0.005)
    assert_within_4_ulp(y, exact_norms(MATRIX))


def test_result_is_float64():
    assert layer_norm(np.ones((2, 3), np.float16)).dtype == np.float64


def test_default_eps_is_1e_minus_5():
    assert_same_bits(layer_norm(X), layer_norm(X, eps=1e-5))
    assert not np.array_equal(layer_norm(X), layer_norm(X, eps=1.1e-5))


def test_scale_and_offset_of_a_row_cancel_without_eps():
    x = np.array(ROW, np.float64)
    np.testing.assert_allclose(layer_norm(40 * x + 7, eps=0), layer_norm(x, eps=0), rtol=4e-16)


def test_scale_and_offset_of_a_row_cancel_up_to_eps():
    x = np.array(ROW, np.float64)
    small, large = layer_norm(x, eps=1e-5), layer_norm(40 * x + 7, eps=1e-5)
    shrinkage = 1e-5 / (2 * 8.75) * (1 - 1 / 1600)
    np.testing.assert_allclose(small / large, 1 - shrinkage, rtol=1e-11)


def test_gamma_offset_is_added_to_gamma():
    y = layer_norm(ROW, [g - 1 for g in GAMMA], BETA, gamma_offset=1)
    np.testing.assert_allclose(y, layer_norm(ROW, GAMMA, BETA), rtol=1e-15)


# Axes


def test_last_axis_is_normalized_not_the_first():
    x = np.array(X)
    y = layer_norm(x, eps=0)
    assert_within_4_ulp(y, exact_norms(X, 0))
    np.testing.assert_allclose(y.sum(axis=1), 0, atol=1e-15)
    assert np.abs(y - exact_norms(x.T, 0).T).max() > 0.1  # down the columns
    assert np.abs(y - layer_norm(x, eps=0, axis=0)).max() > 0.1


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
def test_axes_from_axis_to_the_last_are_normalized_together(axis):
    x = rows_like("mean 1e4", 6, 20).reshape(2, 3, 4, 5)[0]
    normalized = x.shape[axis:]
    width = math.prod(normalized)
    rng = np.random.default_rng(0)
    gamma, beta = rng.random((2, *normalized))
    y = layer_norm(x, gamma, beta, axis=axis)
    truth = exact_norms(x.reshape(-1, width), 1e-5, "layer", gamma.reshape(-1), beta.reshape(-1))
    assert_within_4_ulp(y, truth.reshape(x.shape))
    stats = row_stats(x, axis=axis)
    assert stats.mean.shape == (x.size // width,)
    np.testing.assert_allclose(stats.mean, x.reshape(-1, width).mean(axis=1), rtol=1e-12)


def test_normalized_axis_counts_from_the_front():
    assert [normalized_axis((2, 3, 4), axis) for axis in (-3, -2, -1, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("function", [layer_norm, row_stats])
@pytest.mark.parametrize("axis", [2, -3, 100])
def test_axis_out_of_range_is_refused(function, axis):
    with pytest.raises(UsageError, match=rf"axis {axis}: not an axis of shape \(2, 3\)\n.*-2 to 1"):
        function(X, axis=axis)


@pytest.mark.parametrize("function", [layer_norm, row_stats])
def test_0d_is_refused(function):
    with pytest.raises(UsageError, match="0-d"):
        function(3.0)


@pytest.mark.parametrize("function", [layer_norm, row_stats])
@pytest.mark.parametrize(("shape", "axis"), [((0,), -1), ((3, 0), -1), ((3, 0, 2), -2), ((0, 3), 0)])
def test_zero_width_is_refused(function, shape, axis):
    with pytest.raises(UsageError, match="zero width"):
        function(np.ones(shape), axis=axis)


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 3), -1), ((2, 0, 3), -1), ((0, 2, 3), -2), ((0, 0, 40), -1)]
)
def test_no_rows_give_an_empty_result_of_the_same_shape(shape, axis):
    y = layer_norm(np.ones(shape, np.float32), axis=axis)
    assert y.shape == shape
    assert y.dtype == np.float64
    assert row_stats(np.ones(shape), axis=axis).mean.shape == (0,)


# Parameters


@pytest.mark.parametrize("name", ["gamma", "beta"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (2, 3), (3, 1), (2, 1), (4,), (0,)])
def test_parameters_are_not_broadcast(name, shape):
    with pytest.raises(UsageError, match=rf"(?s){name}: has shape .*expected: shape \(3,\)"):
        layer_norm(X, **{name: np.ones(shape)})


@pytest.mark.parametrize("shape", [(3,), (6,), (1, 3), (3, 2)])
def test_parameters_over_two_axes_are_not_broadcast(shape):
    with pytest.raises(UsageError, match=r"gamma: has shape .*"):
        layer_norm([X, X], np.ones(shape), axis=-2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.bool_, ">f4"])
def test_parameters_of_any_real_dtype(dtype):
    gamma, beta = np.array([1, 0, 1]).astype(dtype), np.array([0, 1, 1]).astype(dtype)
    assert_same_bits(layer_norm(X, gamma, beta), layer_norm(X, [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]))


@pytest.mark.parametrize("kind", ["Layer", "", "batch"])
def test_unknown_kind_is_refused(kind):
    for function in layer_norm, row_stats:
        with pytest.raises(UsageError, match="not a kind of norm"):
            function(X, kind=kind)


@pytest.mark.parametrize("eps", [-1, -5e-324, math.nan, math.inf, -math.inf])
def test_unusable_eps_is_refused(eps):
    for function in layer_norm, row_stats:
        with pytest.raises(UsageError, match="eps"):
            function(X, eps=eps)


# Dtypes


@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, ">i4", np.bool_],
)
def test_integers_and_bool_are_computed_in_float64(dtype):
    x = np.array([[1, 0, 1, 1], [0, 100, 7, 0]]).astype(dtype)
    y = layer_norm(x)
    assert y.dtype == np.float64
    assert_within_4_ulp(y, exact_norms(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_do_not_wrap_around(dtype):
    x = np.array([[np.iinfo(dtype).max, np.iinfo(dtype).min]])
    assert_within_4_ulp(layer_norm(x), np.array([[1.0, -1.0]]))


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", ">f4", "bfloat16", "float8_e4m3fn", "float8_e5m2"], ids=str
)
def test_floats_are_widened_before_any_arithmetic(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = rows_like("normal", 4, 40).astype(dtype)
    assert_same_bits(layer_norm(x), layer_norm(x.astype(np.float64)))


def test_float16_squares_do_not_overflow():
    x = np.array([60000, -60000, 0, 0], np.float16)
    assert_within_4_ulp(layer_norm(x, eps=0), math.sqrt(2) * np.array([1, -1, 0, 0]))


@pytest.mark.parametrize(
    ("x", "name"),
    [
        (np.ones((2, 3), np.complex64), "complex64"),
        ([[1j, 2.0]], "complex128"),
        (np.array([["1", "2"]]), "<U1"),
        (np.array([[b"1", b"2"]]), r"\|S1"),
        (np.array([[1, None]]), "object"),
        (np.array([[2**70, 1]]), "object"),
        (np.array([["2024-01-01"]], "datetime64[D]"), r"datetime64\[D\]"),
        (np.array([[1]], "timedelta64[s]"), r"timedelta64\[s\]"),
        (np.zeros((2, 3), [("a", "f4")]), r"\[\('a', '<f4'\)\]"),
        (np.zeros((2, 3), "V2"), r"\|V2"),
        (np.zeros((2, 3), ml_dtypes.float8_e4m3b11fnuz), "float8_e4m3b11fnuz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_dtypes_are_refused_by_name(x, name):
    for function in layer_norm, row_stats:
        with pytest.raises(UsageError, match=f"dtype {name} "):
            function(x)
    for parameter in "gamma", "beta":
        with pytest.raises(UsageError, match=f"{parameter}: has dtype {name}"):
            layer_norm(np.ones(np.shape(x)), **{parameter: x}, axis=0)


# Extreme rows

finite = st.floats(allow_nan=False, allow_infinity=False)
steps = st.lists(st.integers(-3, 3), min_size=1, max_size=40)
units = st.lists(st.floats(-1, 1), min_size=1, max_size=40)


def near(center, row):
    """Numbers a few places apart, about center."""
    return [float(center + k * np.spacing(abs(center))) for k in row]


any_row = st.one_of(
    st.lists(finite, min_size=1, max_size=12),
    st.builds(near, st.floats(-1e308, 1e308), steps),
    st.builds(lambda row, e: [math.ldexp(v, e) for v in row], units, st.integers(-1074, 1023)),
    st.builds(
        lambda row, m, e: [m + math.ldexp(m * v, e) for v in row], units, finite, st.integers(-60, -2)
    ),
    st.builds(lambda row, v, w: [v if k > 0 else w for k in row], steps, finite, finite),
).map(lambda row: [float(np.clip(v, -LARGEST, LARGEST)) for v in row])
any_eps = st.sampled_from([0.0, 5e-324, 1e-5]) | st.floats(0, allow_infinity=False)


@thorough
@given(any_row, any_eps, st.sampled_from(KINDS))
def test_any_finite_row_is_within_4_ulp(row, eps, kind):
    assert_within_4_ulp(layer_norm(row, eps=eps, kind=kind), exact_norm(row, eps, kind))


def floating_rows(name):
    dtype, limits = np.dtype(name), np.finfo(name)
    floats = st.floats(width=dtype.itemsize * 8, allow_nan=False, allow_infinity=False)
    extremes = [limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 0]
    elements = floats | st.sampled_from([float(v) for v in extremes])
    return st.lists(elements, min_size=1, max_size=40).map(lambda row: np.array([row], dtype))


@thorough
@given(
    st.sampled_from(["f2", "f4", "f8"]).flatmap(floating_rows),
    st.floats(5e-324, allow_infinity=False),
    st.sampled_from(KINDS),
    st.floats(-1e3, 1e3) | st.none(),
    st.floats(-1e3, 1e3) | st.none(),
)
def test_finite_rows_have_finite_results(x, eps, kind, gamma, beta):
    width = x.shape[1]
    gamma, beta = (None if value is None else np.full(width, value) for value in (gamma, beta))
    y = layer_norm(x, gamma, beta, eps, kind=kind)
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= 1.001 * (math.sqrt(width) * (1e3 if gamma is not None else 1) + 1e3)


@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-320, 1e-5, 1e300])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "row",
    [
        [1e200, -1e200, 3e199, 0],
        [2e200, -2e200],
        [1e-200, -2e-200, 4e-201, 0],
        [5e-324, 0, 0, -1e-323],
        [2.2250738585072014e-308, 1e-310, -1e-309, 0],
        [LARGEST, -LARGEST, LARGEST, LARGEST],
        [1.7e308, 1.7e308, 1.7e308, 1.6e308],
        [1.7e308, 1e-300, -5e-324, 1],
        [1e154, 1.5e154, -1e154, 0],
        [1.1e-154, -1.3e-154, 1.2e-154, 1e-154],
        [1.1e-158, -1.3e-158, 1.2e-158, 1e-158],
        [3e-160, -3e-160],
        [1e-140, -1.3e-140, 2e-140, 1e-141],
    ],
    ids=lambda row: f"{row[0]:.3g}",
)
def test_extreme_rows(row, kind, eps):
    y = layer_norm(row, eps=eps, kind=kind)
    assert_within_4_ulp(y, exact_norm(row, eps, kind))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_extreme_rows_do_not_touch_others(eps):
    x = np.concatenate([rows_like(name, 1, 33) for name in FINITE_ROWS])
    y = layer_norm(x, eps=eps)
    for row, result in zip(x, y, strict=True):
        assert_same_bits(result, layer_norm(row, eps=eps))


constants = st.sampled_from([0.1, 1e-310, 5e-324, 1e200, -LARGEST, 1 / 3, -0.0]) | finite
widths = st.integers(1, 70) | st.sampled_from([255, 257, 1000, 4097])


@quick
@given(constants, widths, st.sampled_from([5e-324, 1e-300, 1e-5, 1e300]), st.data())
def test_constant_row_is_exactly_beta(value, width, eps, data):
    x = np.full((2, width), value)
    gamma = data.draw(hnp.arrays("f8", width, elements=st.floats(-1e9, 1e9), fill=st.just(-3.0)))
    beta = data.draw(hnp.arrays("f8", width, elements=finite, fill=st.just(0.1)))
    np.testing.assert_array_equal(layer_norm(x, gamma, beta, eps), [beta, beta])
    np.testing.assert_array_equal(layer_norm(x, gamma, eps=eps), np.zeros((2, width)))
    stats = row_stats(x, eps)
    np.testing.assert_array_equal(stats.mean, [value, value])
    np.testing.assert_array_equal(stats.var, [0, 0])
    np.testing.assert_allclose(stats.rstd, 1 / math.sqrt(eps), rtol=4e-16)


@quick
@given(constants, widths, st.sampled_from(["f2", "f4", "i4", "?"]))
def test_constant_row_of_other_dtypes_is_exactly_beta(value, width, dtype):
    x = np.full((3, width), np.clip(value, -6e4, 6e4)).astype(dtype)
    np.testing.assert_array_equal(layer_norm(x, beta=np.arange(width)), [np.arange(width)] * 3)


@pytest.mark.parametrize("value", [0.1, 1e-310, 5e-324, 1e200, LARGEST, 0.0, -3.0])
@pytest.mark.parametrize("width", [1, 2, 31, 1000])
def test_constant_row_without_eps_is_nan(value, width):
    x = np.concatenate([rows_like("normal", 1, width + 1)[:, :width], np.full((1, width), value)])
    y = layer_norm(x, eps=0, beta=np.ones(width))
    assert np.isnan(y[1]).all()
    assert np.isnan(y[0]).all() == (width == 1)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-310, 1e200, 1.0, -7e10, 2.2250738585072014e-308])
@pytest.mark.parametrize("width", [2, 3, 7, 33])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_row_of_one_place_difference_is_not_constant(value, width, eps):
    row = np.full(width, value)
    row[width // 2] = np.nextafter(value, np.inf)
    y = layer_norm(row, eps=eps)
    assert_within_4_ulp(y, exact_norm(row, eps))
    stats = row_stats([row], eps)
    assert not stats.constant.any()
    if eps == 0:
        assert y[width // 2] > 0 > y[0]


@needs_extended
@pytest.mark.parametrize("width", [1000, 4097, 20_000])
def test_wide_row_of_one_place_difference_is_not_constant(width):
    row = np.full((1, width), 0.1)
    row[0, 77] = np.nextafter(0.1, 1)
    assert_within_4_ulp(layer_norm(row, eps=0), extended_norm(row, eps=0))


@pytest.mark.parametrize("value", [0.1, -1e200, 1e-310, 0.0])
def test_width_1_gives_beta(value):
    np.testing.assert_array_equal(layer_norm([[value], [7.0]], [3.0], [0.7]), [[0.7], [0.7]])


@pytest.mark.parametrize("value", [0.1, -1e200, 1e-310])
def test_width_1_rms_gives_the_sign(value):
    assert_within_4_ulp(layer_norm([[value]], eps=0, kind="rms"), np.array([[math.copysign(1, value)]]))


def test_zero_row_of_rms_norm_is_beta():
    np.testing.assert_array_equal(
        layer_norm(np.zeros(5), np.ones(5), np.arange(5), kind="rms"), np.arange(5)
    )
    assert np.isnan(layer_norm(np.zeros(5), eps=0, kind="rms")).all()


def test_constant_row_of_rms_norm_is_not_zero():
    np.testing.assert_allclose(layer_norm(np.full(5, -0.1), eps=0, kind="rms"), -1, rtol=4e-16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [1, 2, 5, 33, 5000])
def test_row_with_nan_or_inf_is_all_nan_and_no_other_changes(width, value, kind):
    x = rows_like("normal", 5, width)
    x[2, width // 2] = value
    y = layer_norm(x, np.ones(width), np.ones(width), kind=kind)
    assert np.isnan(y[2]).all()
    for i in (0, 1, 3, 4):
        assert np.isfinite(y[i]).all()
        assert_same_bits(y[i], layer_norm(x[i], np.ones(width), np.ones(width), kind=kind))
    np.testing.assert_array_equal(row_stats(x, kind=kind).nonfinite, [False, False, True, False, False])


@pytest.mark.parametrize(
    "row",
    [
        [math.inf, -math.inf, 1],
        [math.inf] * 3,
        [math.nan] * 3,
        [1e308, 1e308, -math.inf],
        [0, 0, math.nan],
    ],
)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_nonfinite_values_are_all_nan(row, kind, eps):
    assert np.isnan(layer_norm(row, eps=eps, kind=kind)).all()
    stats = row_stats([row], eps, kind=kind)
    assert stats.nonfinite.all()
    assert not stats.constant.any()
    assert np.isnan([stats.var, stats.rstd]).all()
    assert not np.isfinite(stats.mean).any()


# Statistics


def places(value, truth, unit):
    """|value - truth| in last places of unit."""
    return 0 if value == truth else abs(value - truth) / math.ulp(unit)


@thorough
@given(any_row, st.sampled_from([0.0, 5e-324]) | st.floats(1e-12, 1e3), st.sampled_from(KINDS))
def test_statistics_of_any_finite_row(row, eps, kind):
    stats = row_stats([row], eps, kind=kind)
    mean, var, rstd = exact_stats(row, eps, kind)
    assert places(stats.mean[0], mean, max(map(abs, row))) <= 8
    assert places(stats.var[0], var, var) <= 8
    if math.isnan(rstd):
        assert math.isinf(stats.rstd[0])
    else:
        assert places(stats.rstd[0], rstd, rstd) <= 8
    assert stats.constant[0] == (len(set(row)) == 1)
    assert not stats.nonfinite[0]


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [768, 4099])
@pytest.mark.parametrize(
    "name", ["normal", "mean 1e6, sd 0.1", "one feature x 3000", "sd of 2**-43 means"]
)
def test_statistics_of_wide_rows(name, width, kind):
    x = rows_like(name, 5, width)
    stats = row_stats(x, kind=kind)
    extended = x.astype(np.longdouble)
    mean = extended.mean(axis=1)
    centred = extended - mean[:, None]
    centred -= centred.mean(axis=1)[:, None]
    squares = centred if kind == "layer" else extended
    var = (squares * squares).mean(axis=1)
    root_mean_square = np.sqrt((extended * extended).mean(axis=1))
    assert (np.abs(stats.mean - mean) <= 1e-14 * root_mean_square).all()
    np.testing.assert_allclose(stats.var, var.astype(np.float64), rtol=2e-15)
    np.testing.assert_allclose(stats.rstd, (1 / np.sqrt(var + 1e-5)).astype(np.float64), rtol=2e-15)


@pytest.mark.parametrize("width", [2, 7, 31, 33, 768, 4097])
@pytest.mark.parametrize("kind", KINDS)
def test_constant_marks_rows_of_one_value(width, kind):
    values = np.concatenate(
        [np.random.default_rng(0).standard_normal(99), [0.1, 0, 1e200, 1e-310, LARGEST]]
    )
    x = np.repeat(values[:, None], width, axis=1)
    x[::2, width - 1] = np.nextafter(x[::2, width - 1], 0)
    stats = row_stats(x, kind=kind)
    np.testing.assert_array_equal(stats.constant, [len(set(row)) == 1 for row in x])
    assert 50 < stats.constant.sum() < 60
    alone = [row_stats(row[None], kind=kind).constant[0] for row in x]
    np.testing.assert_array_equal(alone, stats.constant)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_of_ordinary_rows_beside_constant_ones(kind):
    x = np.concatenate(
        [rows_like("normal", 2, 40), rows_like("constant", 2, 40), rows_like("inf", 1, 40)]
    )
    np.testing.assert_array_equal(row_stats(x, kind=kind).constant, [False, False, True, True, False])


@pytest.mark.parametrize("name", NONFINITE)
def test_statistics_of_other_rows_beside_nonfinite_ones(name):
    x = np.concatenate([rows_like(name, 1, 9), rows_like("normal", 2, 9)])
    stats, clean = row_stats(x), row_stats(x[1:])
    for field, expected in zip(stats[:5], clean[:5], strict=True):
        assert_same_bits(field[1:], expected)


def test_rows_of_statistics_are_the_leading_axes_in_c_order():
    x = np.asfortranarray(np.random.default_rng(0).standard_normal((2, 3, 7)))
    means = row_stats(x).mean
    np.testing.assert_allclose(means, [x[i, j].mean() for i in range(2) for j in range(3)], atol=1e-15)


def test_rms_statistics_do_not_follow_an_offset_away():
    """The mean square grows with an offset; a variance would not."""
    stats = row_stats([[3.0, 5.0], [1003.0, 1005.0]], eps=0, kind="rms")
    np.testing.assert_array_equal(stats.var, [17, 1008017])
    np.testing.assert_array_equal(stats.mean, [4, 1004])
    np.testing.assert_allclose(stats.rstd, [1 / math.sqrt(17), 1 / math.sqrt(1008017)], rtol=4e-16)


@needs_extended
def test_mean_of_wide_rows_is_corrected_by_the_mean_of_the_residuals():
    x = rows_like("mean 1e6, sd 0.1", 40, 4099)
    truth = x.astype(np.longdouble).mean(axis=1)
    assert np.abs(row_stats(x).mean - truth).max() < 0.6 * math.ulp(1e6)


def signalling(dtype, unsigned, pattern):
    return np.array([1, pattern, 2], unsigned).view(dtype)


@pytest.mark.parametrize(
    "values",
    [
        signalling("f8", "u8", 0x7FF0000000000001),
        signalling("f4", "u4", 0x7F800001),
        signalling("f2", "u2", 0x7C01),
        signalling(ml_dtypes.bfloat16, "u2", 0x7F81),
    ],
    ids=lambda values: values.dtype.name,
)
def test_signalling_nan_is_nan_without_a_warning(values):
    assert np.isnan(layer_norm(values)).all()
    np.testing.assert_array_equal(np.isnan(layer_norm([1, 2, 3], values)), [False, True, False])
    np.testing.assert_array_equal(np.isnan(layer_norm([1, 2, 3], None, values)), [False, True, False])


# Memory order


@pytest.mark.parametrize("axis", [-1, -2, 0])
def test_memory_order_does_not_change_a_bit(axis):
    x = np.random.default_rng(0).standard_normal((6, 5, 37))
    expected = layer_norm(x, axis=axis)
    assert_same_bits(layer_norm(np.asfortranarray(x), axis=axis), expected)
    assert_same_bits(layer_norm(x.transpose(2, 0, 1).copy().transpose(1, 2, 0), axis=axis), expected)
    assert_same_bits(layer_norm(x.tolist(), axis=axis), expected)
