"""The torch engine: torch.nn.functional.layer_norm and rms_norm, in x's own dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError
from ..norm.backward import BackwardKernel
from ..norm.forward import Kernel
from ..norm.spec import Norm
from .foreign import foreign_backward_kernel, foreign_kernel

__all__ = ["prepare", "prepare_backward"]

Array = npt.NDArray[np.generic]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker; Raises UsageError where there is no such device."""
    gamma, beta = _parameters(norm, device)

    def run(x: Array) -> Array:
        tensor = _tensor(x).to(device)
        weight = None if gamma is None else gamma.to(tensor.dtype)
        bias = None if beta is None else beta.to(tensor.dtype)
        return _array(_forward(norm, width)(tensor, weight, bias).cpu(), x.dtype)

    return foreign_kernel(norm, width, run)


def prepare_backward(norm: Norm, width: int, device: str = "cpu") -> BackwardKernel:
    """Return a backward kernel for one worker, by autograd; Raises UsageError as prepare."""
    gamma, beta = _parameters(norm, device)
    forward = _forward(norm, width)

    def run(x: Array, dy: Array) -> tuple[Array, Array, Array]:
        tensor = _tensor(x).to(device).requires_grad_()
        weight = torch.ones(width, device=device) if gamma is None else gamma
        bias = torch.zeros(width, device=device) if beta is None else beta
        weight, bias = (part.to(tensor.dtype).requires_grad_() for part in (weight, bias))
        y = forward(tensor, weight, bias)
        gradients = torch.autograd.grad(y, (tensor, weight, bias), _tensor(dy).to(device))
        dx, dgamma, dbeta = (_array(part.cpu(), x.dtype) for part in gradients)
        return dx, dgamma, dbeta

    return foreign_backward_kernel(norm, width, run)


def _parameters(norm: Norm, device: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda", "torch finds none here", "cpu", "--device cpu")
    torch.set_num_threads(1)  # the workers are the threads
    gamma = None if norm.gamma is None else torch.from_numpy(norm.gamma).to(device)
    beta = None if norm.beta is None else torch.from_numpy(norm.beta).to(device)
    return gamma, beta


def _forward(
    norm: Norm, width: int
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]:
    """The norm as a function of x, gamma and beta."""

    def layer(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (width,), gamma, beta, norm.eps)

    def rms(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, (width,), gamma, norm.eps)
        return y if beta is None else y + beta

    return layer if norm.kind == "layer" else rms


def _tensor(x: Array) -> torch.Tensor:
    """The memory of x as a tensor; torch knows numpy's dtypes, and bfloat16 only by its bits."""
    if not x.flags.writeable:  # which torch warns of
        x = x.copy()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _array(y: torch.Tensor, dtype: np.dtype[np.generic]) -> Array:
    if y.dtype == torch.bfloat16:
        y = y.view(torch.int16)
    array: Array = y.numpy()
    return array.view(dtype)
