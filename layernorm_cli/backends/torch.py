"""The torch engine: torch.nn.functional.layer_norm and rms_norm, in x's own dtype."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError
from ..norm.forward import Kernel
from ..norm.spec import Norm
from .foreign import foreign_kernel

__all__ = ["prepare"]

Array = npt.NDArray[np.generic]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker; Raises UsageError where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda", "torch finds none here", "cpu", "--device cpu")
    torch.set_num_threads(1)  # the workers are the threads
    gamma = None if norm.gamma is None else torch.from_numpy(norm.gamma).to(device)
    beta = None if norm.beta is None else torch.from_numpy(norm.beta).to(device)

    def run(x: Array) -> Array:
        tensor = _tensor(x).to(device)
        weight = None if gamma is None else gamma.to(tensor.dtype)
        bias = None if beta is None else beta.to(tensor.dtype)
        if norm.kind == "layer":
            y = torch.nn.functional.layer_norm(tensor, (width,), weight, bias, norm.eps)
        else:
            y = torch.nn.functional.rms_norm(tensor, (width,), weight, norm.eps)
            y = y if bias is None else y + bias
        return _array(y.cpu(), x.dtype)

    return foreign_kernel(norm, width, run)


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
