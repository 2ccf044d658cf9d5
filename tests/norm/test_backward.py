"""The backward pass against differences of the forward formula in 90 digits, and against long double."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

from layernorm_cli import layer_norm, layer_norm_backward
from layernorm_cli.errors import UsageError
from layernorm_cli.norm import backward
from layernorm_cli.norm.backward import ParameterSums, backward_kernel, by_segments, segment_rows
from layernorm_cli.norm.forward import row_kernel
from layernorm_cli.norm.spec import Norm

from .oracle import (
    DISTRIBUTIONS,
    assert_same_bits,
    exact_gradients,
    extended_gradients,
    needs_extended,
    quick,
    rows_like,
)

KINDS = ("layer", "rms")
RNG = np.random.default_rng(5)


def errors(found, truth):
    """The largest error of each gradient, relative to its largest number."""
    for values, expected in zip(found, truth, strict=True):
        scale = np.abs(expected).max()
        yield float(np.abs(values - expected).max() / (scale or 1))


def test_by_hand():
    """x = (-1, 1), eps 0.25 with var 1: rstd = 1/sqrt(1.25); dy = (1, 0)."""
    rstd = 1.25**-0.5
    found = layer_norm_backward([-1.0, 1.0], [1.0, 0.0], eps=0.25)
    slope = 0.5 * rstd * -1  # mean of dy * xhat
    np.testing.assert_allclose(found.dx, [rstd * (0.5 + slope * rstd), rstd * (-0.5 - slope * rstd)])
    np.testing.assert_allclose(found.dgamma, [-rstd, 0])
    np.testing.assert_array_equal(found.dbeta, [1, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_gamma", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (4, 3), (2, 9)])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_against_differences_in_ninety_digits(kind, with_gamma, shape, eps):
    x, dy = RNG.normal(2, 1.5, (2, *shape))
    gamma = RNG.normal(1, 0.5, shape[1]) if with_gamma else None
    found = layer_norm_backward(x, dy, gamma, eps=eps, kind=kind)
    truth = exact_gradients(x, dy, eps, kind, gamma)
    rstd = 1 / np.sqrt(x.var(axis=1).min() + eps)
    assert np.abs(found.dx - truth[0]).max() <= 1e-14 * np.abs(dy).max() * max(rstd, 1) * 4
    np.testing.assert_allclose(found.dgamma, truth[1], 1e-12, 1e-13)
    np.testing.assert_allclose(found.dbeta, truth[2], 1e-15, 1e-15)


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("width", [5, 33, 768, 5003])
def test_against_long_double(kind, name, width):
    rows = max(3, 60_000 // width)  # several segments, and a rest
    x, dy = rows_like(name, rows, width), rows_like("normal", rows, width, 1)
    gamma = 1 + 0.3 * rows_like("normal", 1, width, 2)[0]
    found = layer_norm_backward(x, dy, gamma, kind=kind)
    truth = extended_gradients(x, dy, kind=kind, gamma=gamma)
    assert rows % segment_rows(width)
    assert max(errors(found, truth)) <= 2e-15 * (1 if name != "one feature x 3000" else 40)


@needs_extended
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int16", "bool"])
@pytest.mark.parametrize("dy_dtype", ["float64", "float16", "bfloat16"])
def test_any_dtypes_are_widened_exactly(x_dtype, dy_dtype):
    x = (3 * rows_like("normal", 20, 33)).astype(getattr(ml_dtypes, x_dtype, x_dtype))
    dy = rows_like("normal", 20, 33, 1).astype(getattr(ml_dtypes, dy_dtype, dy_dtype))
    found = layer_norm_backward(x, dy)
    assert {part.dtype for part in found} == {np.dtype(np.float64)}
    assert max(errors(found, extended_gradients(x, dy))) <= 2e-15


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
def test_float32_results_are_correctly_rounded(kind):
    x, dy = (rows_like(name, 200, 768, 3).astype(np.float32) for name in ("mean 1e4", "normal"))
    dx = np.empty_like(x)
    backward_kernel(Norm(kind), 768)(x, dy, dx)
    wrong = np.count_nonzero(dx != extended_gradients(x, dy, kind=kind)[0].astype(np.float32))
    assert wrong <= 1e-4 * dx.size


SITES = ("h.0.ln_1", "h.5.ln_2", "h.11.ln_1", "ln_f")


@pytest.mark.parametrize("site", SITES)
def test_a_trained_models_gradients(site):
    from conftest import DATA

    folder = DATA / "gpt2"
    gradients = load_file(folder / "gradients.safetensors")
    weights = load_file(folder / "norms.safetensors")
    x = load_file(folder / "activations.safetensors")[f"{site}.input"]
    found = layer_norm_backward(x, gradients[f"{site}.dy"], weights[f"transformer.{site}.weight"])
    for values, name in zip(found, ("dx", "dweight", "dbias"), strict=True):
        assert_same_bits(values.astype(np.float32), gradients[f"{site}.{name}"])


normal_numbers = st.floats(-1e3, 1e3, allow_subnormal=False, width=32)


@quick
@given(
    x=arrays(np.float64, (3, 7), elements=normal_numbers),
    dy=arrays(np.float64, (3, 7), elements=normal_numbers),
    eps=st.sampled_from([1e-5, 1e-12, 1.0]),
)
def test_dx_sums_to_0_and_is_orthogonal_to_xhat_up_to_eps(x, dy, eps):
    gamma = np.linspace(0.5, 2, 7)
    dx = layer_norm_backward(x, dy, gamma, eps=eps).dx
    xhat = layer_norm(x, eps=eps)
    rstd = 1 / np.sqrt(x.var(axis=1) + eps)
    size = np.abs(dy * gamma).max() * rstd + 1e-300
    assert (np.abs(dx.sum(axis=1)) <= 1e-13 * size).all()
    # mean(dx * xhat) = rstd * mean(g * xhat) * eps * rstd^2, as mean(xhat^2) = var / (var + eps)
    expected = rstd * (dy * gamma * xhat).mean(axis=1) * eps * rstd**2
    assert (np.abs((dx * xhat).mean(axis=1) - expected) <= 1e-13 * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 64, 769])
def test_bits_do_not_depend_on_blocks(kind, width):
    size = segment_rows(width)
    rows = 3 * size + 5 if size < 500 else size + 7
    x, dy = (rows_like("mean 1e4", rows, width, seed).astype(np.float32) for seed in range(2))
    norm = Norm(kind, 1e-5, np.linspace(0.5, 2, width))
    whole, parts = np.empty_like(x), np.empty_like(x)
    found = backward_kernel(norm, width)(x, dy, whole)
    kernel = backward_kernel(norm, width)
    blocks = [slice(0, size), slice(size, rows)]
    separate = [kernel(x[block], dy[block], parts[block]) for block in blocks]
    assert_same_bits(parts, whole)
    for index in (1, 2):
        assert_same_bits(np.concatenate([part[index] for part in separate]), found[index])
    assert len(found.dgamma) == -(-rows // size)


def test_rows_with_nan_or_inf_are_all_nan_and_change_no_other():
    x, dy = rows_like("normal", 8, 16), rows_like("normal", 8, 16, 1)
    clean = layer_norm_backward(x, dy)
    x[2, 5], dy[4, 0], dy[6, 3] = np.inf, np.nan, -np.inf
    dx, dgamma, dbeta = layer_norm_backward(x, dy)
    bad = np.isin(np.arange(8), [2, 4, 6])
    assert np.isnan(dx[bad]).all()
    assert_same_bits(dx[~bad], clean.dx[~bad])
    assert np.isnan(dgamma).all()  # xhat of row 2 is all NaN
    assert np.isnan(dbeta[0])
    assert dbeta[3] == -np.inf
    assert np.isfinite(dbeta[[1, 2, *range(4, 16)]]).all()
    stats = backward_kernel(Norm(), 16)(x, dy, None).stats
    np.testing.assert_array_equal(stats.nonfinite, bad)


def test_sums_of_huge_finite_numbers_are_not_taken_for_infinite_rows():
    x, dy = rows_like("normal", 4, 16), np.full((4, 16), 1e308)
    stats = backward_kernel(Norm(), 16)(x, dy, None).stats
    assert not stats.nonfinite.any()


def test_constant_rows():
    dy = rows_like("normal", 2, 8)
    dx, dgamma, dbeta = layer_norm_backward(np.full((2, 8), 7.0), dy, eps=0.25)
    np.testing.assert_allclose(dx, 2 * (dy - dy.mean(axis=1, keepdims=True)), 1e-15, 1e-15)
    assert not dgamma.any()
    np.testing.assert_allclose(dbeta, dy.sum(axis=0))
    assert np.isnan(layer_norm_backward(np.full((2, 8), 7.0), dy, eps=0).dx).all()


def test_results_too_large_are_counted():
    x, dy = 1e-3 * rows_like("normal", 4, 16), np.full((4, 16), 1.0)
    dy[1] *= np.linspace(1e5, 2e5, 16)
    dx = np.empty(x.shape, np.float16)
    stats = backward_kernel(Norm("rms", 1e-12), 16)(x, dy, dx).stats
    assert stats.overflow == np.isinf(dx).sum() > 0


def test_compensation_keeps_what_running_sums_lose():
    sums = ParameterSums.zero(2)
    sums.add([np.array([1e16, 1.0])])
    sums.add([np.array([1.0, 1e-30])] * 1000)
    sums.add([np.array([-1e16, -1.0])])
    np.testing.assert_allclose(sums.value(), [1000, 1e-27], 1e-13)


def test_many_rows_are_summed_to_the_last_bits():
    rows = 200_000
    dy = np.full((rows, 1), 0.1)
    assert layer_norm_backward(np.ones((rows, 1)), dy).dbeta[0] == 0.1 * rows


def test_no_rows():
    dx, dgamma, dbeta = layer_norm_backward(np.empty((0, 5)), np.empty((0, 5)))
    assert dx.shape == (0, 5)
    np.testing.assert_array_equal([dgamma, dbeta], np.zeros((2, 5)))


def test_several_axes_and_offset():
    x, dy = RNG.normal(0, 1, (2, 3, 4, 5))
    gamma = RNG.normal(0, 1, (4, 5))
    found = layer_norm_backward(x, dy, gamma, axis=-2, gamma_offset=1)
    flat = layer_norm_backward(x.reshape(3, 20), dy.reshape(3, 20), gamma.reshape(20) + 1)
    assert_same_bits(found.dx.reshape(3, 20), flat.dx)
    assert found.dgamma.shape == found.dbeta.shape == (4, 5)
    assert_same_bits(found.dgamma.reshape(20), flat.dgamma)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1.0]), "dy: has shape"),
        (([1.0, 2.0], [1.0, 2j]), "complex"),
        (([1.0, 2.0], [1.0, 2.0], [1.0]), "gamma: has shape"),
        ((1.0, 1.0), "0-d"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UsageError, match=message):
        layer_norm_backward(*arguments)


def test_formulas_with_a_fault_are_found(monkeypatch):
    """The comparison with 90 digits is not blind: it sees each term that is left out."""
    x, dy = RNG.normal(2, 1.5, (2, 3, 5))
    truth = exact_gradients(x, dy)[0]
    xhat, rstd = layer_norm(x), 1 / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    mean, slope = dy.mean(axis=1, keepdims=True), (dy * xhat).mean(axis=1, keepdims=True)
    right = rstd * (dy - mean - xhat * slope)
    assert np.abs(right - truth).max() < 1e-14
    for wrong in (rstd * (dy - mean), rstd * (dy - xhat * slope), dy - mean - xhat * slope):
        assert np.abs(wrong - truth).max() > 1e-3


def test_segments_are_cut_by_width_alone(monkeypatch):
    monkeypatch.setattr(backward, "SEGMENT_ELEMENTS", 12)
    seen = []

    def segment(x, dy, dx):
        seen.append(len(x))
        return row_kernel(Norm(), 4)(x, None), np.zeros(4), np.zeros(4)

    by_segments(segment, 4)(np.ones((8, 4)), np.ones((8, 4)), None)
    assert seen == [3, 3, 2]
