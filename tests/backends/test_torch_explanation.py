"""What explain says, against torch: derivatives by autograd, batch norm, and half arithmetic."""

import numpy as np
import pytest

from layernorm_cli import explain

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
functional = torch.nn.functional


def normalize(kind, x, gamma, beta, eps):
    if kind == "layer":
        return functional.layer_norm(x, x.shape, gamma, beta, eps)
    return functional.rms_norm(x, x.shape, gamma, eps) + beta


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [1, 2, 33, 768])
@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
def test_grad_is_a_column_of_autograds_jacobian(width, kind, scale):
    generator = torch.Generator().manual_seed(width)
    x, gamma, beta = scale * torch.randn(3, width, generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda row: normalize(kind, row, gamma, beta, 1e-5), x
    ).numpy()
    for j in {0, width // 2, width - 1}:
        steps = explain(x.numpy(), gamma=gamma.numpy(), beta=beta.numpy(), kind=kind, grad=j)
        largest = steps.rstd * np.abs(gamma.numpy()).max()
        np.testing.assert_allclose(steps.grad, jacobian[:, j], 1e-10, 1e-13 * largest)


@pytest.mark.parametrize("shape", [(2, 3), (5, 7, 16), (400, 64)])
def test_batch_norm_is_torchs(shape):
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(shape, generator=generator, dtype=torch.float64)
    gamma, beta = torch.randn(2, shape[-1], generator=generator, dtype=torch.float64)
    matrix = x.reshape(-1, shape[-1])
    theirs = functional.batch_norm(matrix, None, None, gamma, beta, training=True, eps=1e-3)
    for row in (0, -1):
        ours = explain(x.numpy(), row, gamma.numpy(), beta.numpy(), 1e-3, compare_axis=True)
        np.testing.assert_allclose(ours.compare_axis.y, theirs[row].numpy(), 1e-11, 1e-13)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1e-3, 1, 50])
def test_short_dtypes_are_as_in_torch(name, scale):
    """torch rounds each elementwise result to the tensor's dtype; sums are folded by hand."""
    dtype = getattr(torch, name)
    row = scale * torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def mean(values):
        count = len(values)
        while len(values) > 1:
            half = len(values) // 2
            folded = values[:half] + values[half : 2 * half]
            if len(values) % 2:
                folded[0] = folded[0] + values[-1]
            values = folded
        return (values[0].double() / count).to(dtype)

    x = row.to(dtype)
    centred = x - mean(x)
    var = mean(centred * centred)
    below = var + torch.tensor(1e-5, dtype=dtype)
    std = below.double().sqrt().to(dtype)  # torch's float32 roots are not all correctly rounded
    y = centred / std
    truth = functional.layer_norm(row, row.shape, eps=1e-5)
    error = float((y.double() - truth).abs().max())
    (found,) = (short for short in explain(row.numpy()).dtypes if short.dtype == name)
    assert found.var == float(var)
    assert found.max_abs_error == pytest.approx(error, rel=1e-9, abs=1e-15)
