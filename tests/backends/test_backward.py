"""The backward pass of every engine that has one."""

import importlib

import numpy as np
import pytest
from norm.oracle import assert_same_bits, extended_gradients, needs_extended, rows_like

from layernorm_cli.backends import ENGINES, choose_engine, is_installed, load_prepare_backward
from layernorm_cli.errors import UsageError
from layernorm_cli.norm.backward import ParameterSums, segment_rows
from layernorm_cli.norm.spec import Norm

from .suite import UNITS, epsilon, numpy_dtype

pytestmark = needs_extended
KINDS = ("layer", "rms")
EXACT_FLOAT64 = 4e-15  # of the largest number of a gradient


def marks(name):
    engine = ENGINES[name]
    found = [pytest.mark.skipif(not is_installed(engine), reason=f"no {engine.package}")]
    return found + ([getattr(pytest.mark, name)] if engine.extra else [])


WITH_BACKWARD = [name for name, engine in ENGINES.items() if engine.backward]
engines = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in WITH_BACKWARD]
)


def gradients(name, norm, x, dy, dx_dtype=None):
    module = importlib.import_module(ENGINES[name].module)
    dx = np.empty(x.shape, dx_dtype or x.dtype)
    found = module.prepare_backward(norm, x.shape[1], "cpu")(x, dy, dx)
    sums = [ParameterSums.zero(x.shape[1]) for _ in range(2)]
    sums[0].add(found.dgamma)
    sums[1].add(found.dbeta)
    return dx, *(total.value() for total in sums), found


def test_the_three_that_the_command_offers():
    assert WITH_BACKWARD == ["numpy", "numba", "torch"]


@engines
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("with_gamma", [False, True])
@pytest.mark.parametrize("width", [1, 5, 33, 769])
def test_values(name, kind, dtype, with_gamma, width):
    rows = 2 * segment_rows(width) + 3 if width > 33 else 99
    dtype = numpy_dtype(dtype)
    x = (2 + rows_like("normal", rows, width)).astype(dtype)
    dy = rows_like("normal", rows, width, 1).astype(dtype)
    gamma = (1 + 0.3 * rows_like("normal", 1, width, 2)[0]).astype(dtype).astype(np.float64)
    norm = Norm(kind, 1e-3, gamma if with_gamma else None)
    *found, _ = gradients(name, norm, x, dy)
    truth = extended_gradients(x, dy, 1e-3, kind, gamma if with_gamma else 1)
    for index, (values, expected) in enumerate(zip(found, truth, strict=True)):
        scale = max(np.abs(expected).max(), 1)
        error = np.abs(values.astype(np.longdouble) - expected).max() / scale
        if not ENGINES[name].exact:
            assert error <= UNITS[dtype.name] * 8 * epsilon(dtype)
        else:
            assert error <= (epsilon(dtype) / 2 if index == 0 else 0) + EXACT_FLOAT64


@engines
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_nan_are_all_nan_and_change_no_other(name, kind):
    x = rows_like("normal", 9, 64).astype(np.float32)
    dy = rows_like("normal", 9, 64, 1).astype(np.float32)
    clean = gradients(name, Norm(kind), x, dy)[0]
    x[3, 7], dy[6, 2] = np.nan, np.inf
    dx, *_, found = gradients(name, Norm(kind), x, dy)
    bad = np.isin(np.arange(9), [3, 6])
    assert np.isnan(dx[bad]).all()
    assert_same_bits(dx[~bad], clean[~bad])
    np.testing.assert_array_equal(found.stats.nonfinite, bad)


@engines
def test_other_dtypes_of_dx_dy_and_memory(name):
    x = rows_like("normal", 50, 64).astype(np.float32)
    dy = rows_like("normal", 50, 64, 1).astype(np.float32)
    expected = gradients(name, Norm(), x, dy, np.float64)
    others = (x.astype(">f4"), np.asfortranarray(dy)), (x[::-1].copy()[::-1], dy.astype(np.float64))
    for other_x, other_dy in others:
        found = gradients(name, Norm(), other_x, other_dy, np.float64)
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert_same_bits(one, other)


@engines
def test_sums_without_dx_and_no_rows(name):
    x, dy = rows_like("normal", 70, 33), rows_like("normal", 70, 33, 1)
    kernel = importlib.import_module(ENGINES[name].module).prepare_backward(Norm(), 33, "cpu")
    with_dx, without = kernel(x, dy, np.empty_like(x)), kernel(x, dy, None)
    assert_same_bits(without.dgamma, with_dx.dgamma)
    assert_same_bits(without.dbeta, with_dx.dbeta)
    empty = kernel(x[:0], dy[:0], x[:0].copy())
    assert not empty.dgamma.any()
    assert not empty.dbeta.any()
    assert len(empty.stats.mean) == 0


@pytest.mark.parametrize("name", [name for name in WITH_BACKWARD if ENGINES[name].exact])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [3, 64, 769])
def test_exact_engines_give_the_same_bits_in_any_blocks(name, kind, width):
    if not is_installed(ENGINES[name]):
        pytest.skip(f"no {name}")
    size = segment_rows(width)
    x, dy = (rows_like("mean 1e4", 2 * size + 7, width, seed).astype(np.float32) for seed in range(2))
    *whole, _ = gradients(name, Norm(kind), x, dy)
    parts = [gradients(name, Norm(kind), x[cut], dy[cut]) for cut in (slice(size), slice(size, None))]
    assert_same_bits(np.concatenate([part[0] for part in parts]), whole[0])
    for index in (0, 1):
        sums = ParameterSums.zero(width)
        for part in parts:
            sums.add(part[3][1 + index])
        assert_same_bits(sums.value(), whole[1 + index])


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 3), (7, 64), (300, 768), (3, 5000)])
@pytest.mark.parametrize("with_gamma", [False, True])
def test_double_precision_autograd(kind, shape, with_gamma):
    torch = pytest.importorskip("torch")
    width = shape[1]
    x, dy = 2 + 3 * rows_like("normal", *shape), rows_like("normal", *shape, 1)
    gamma = 1 + 0.3 * rows_like("normal", 1, width, 2)[0] if with_gamma else np.ones(width)
    leaves = [torch.tensor(part, requires_grad=True) for part in (x, gamma, np.zeros(width))]
    if kind == "layer":
        y = torch.nn.functional.layer_norm(leaves[0], (width,), leaves[1], leaves[2], 1e-5)
    else:
        y = torch.nn.functional.rms_norm(leaves[0], (width,), leaves[1], 1e-5) + leaves[2]
    truth = torch.autograd.grad(y, leaves, torch.tensor(dy))
    *found, _ = gradients("numpy", Norm(kind, 1e-5, gamma if with_gamma else None), x, dy)
    for values, expected in zip(found, truth, strict=True):
        np.testing.assert_allclose(values, expected.numpy(), 0, 1e-12 * np.abs(expected.numpy()).max())


def test_engines_without_a_backward_pass_say_so():
    with pytest.raises(UsageError, match="backend jax: has no backward pass"):
        load_prepare_backward("jax", ENGINES["jax"], "layer", "float32", "cpu")


def test_what_the_engine_cannot_do():
    name, engine = choose_engine("numpy", 1)
    with pytest.raises(UsageError, match="cannot do device cuda"):
        load_prepare_backward(name, engine, "layer", "float32", "cuda")
