"""torch.nn.functional.layer_norm and rms_norm, over one, two and three normalized axes."""

import numpy as np
import pytest

from layernorm_cli.norm.arrays import layer_norm
from layernorm_cli.tasks.apply import ApplyRequest, apply

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
functional = torch.nn.functional

SHAPES = [(7, 1), (5, 33), (2, 3, 768), (2, 3, 4, 5), (3, 1, 40, 6), (2, 2, 1, 1031)]
CASES = [(shape, -n) for shape in SHAPES for n in (1, 2, 3) if n < len(shape)]
CASES += [((4, 5), -2), ((2, 3, 4), -3)]  # all of x is one row
UNITS = {"float32": 16, "float16": 2, "bfloat16": 2}  # of torch's own precision, at max(1, |y|)


def tensors(shape, axis, dtype):
    generator = torch.Generator().manual_seed(len(shape) - axis)
    of = {"generator": generator, "dtype": torch.float64}
    x = 0.5 + torch.randn(shape, **of)
    gamma, beta = 1 + 0.3 * torch.randn(shape[axis:], **of), 0.5 * torch.randn(shape[axis:], **of)
    return [tensor.to(getattr(torch, dtype)) for tensor in (x, gamma, beta)]


def wide(tensor):
    return tensor.to(torch.float64).numpy()


def theirs(kind, x, gamma, beta, axis, eps=1e-5):
    if kind == "layer":
        return functional.layer_norm(x, x.shape[axis:], gamma, beta, eps)
    return functional.rms_norm(x, x.shape[axis:], gamma, eps) + beta


def error(y, expected):
    return (np.abs(y - expected) / np.maximum(1, np.abs(expected))).max()


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_float64(shape, axis, kind):
    x, gamma, beta = tensors(shape, axis, "float64")
    y = layer_norm(x.numpy(), gamma.numpy(), beta.numpy(), axis=axis, kind=kind)
    assert error(y, theirs(kind, x, gamma, beta, axis).numpy()) <= 1e-12


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 10])
def test_eps(eps):
    x, gamma, beta = tensors((5, 33), -1, "float64")
    y = layer_norm(x.numpy(), gamma.numpy(), beta.numpy(), eps)
    assert error(y, theirs("layer", x, gamma, beta, -1, eps).numpy()) <= 1e-12


def test_without_gamma_and_beta():
    x, gamma, beta = tensors((5, 33), -1, "float64")
    for ours in ((None, None), (gamma, None), (None, beta)):
        y = layer_norm(x.numpy(), *(p if p is None else p.numpy() for p in ours))
        assert error(y, functional.layer_norm(x, (33,), *ours).numpy()) <= 1e-12


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_lower_precision(shape, axis, kind, dtype):
    x, gamma, beta = tensors(shape, axis, dtype)
    y = layer_norm(wide(x), wide(gamma), wide(beta), axis=axis, kind=kind)
    bound = UNITS[dtype] * torch.finfo(x.dtype).eps
    assert error(y, wide(theirs(kind, x, gamma, beta, axis))) <= bound


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", *UNITS])
@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4, 5), -n) for n in (1, 2, 3)])
def test_files(shape, axis, dtype, backend, here):
    """The torch engine's y is torch's own, to the last bit; the numpy engine's is near it."""
    from safetensors.torch import load_file, save_file

    x, gamma, beta = tensors(shape, axis, dtype)
    save_file({"x": x, "gamma": gamma, "beta": beta}, "in.safetensors")
    refs = (f"in.safetensors#{name}" for name in ("x", "gamma", "beta"))
    apply(ApplyRequest(*refs, axis=axis, backend=backend, output="y.safetensors"))
    (y,) = load_file("y.safetensors").values()
    expected = theirs("layer", x, gamma, beta, axis)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    if backend == "torch":
        assert torch.equal(y, expected)
    else:
        bound = 1e-12 if dtype == "float64" else UNITS[dtype] * torch.finfo(x.dtype).eps
        assert error(wide(y), wide(expected)) <= bound
