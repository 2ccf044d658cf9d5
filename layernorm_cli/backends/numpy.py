"""The numpy engine: the reference itself."""

from __future__ import annotations

from ..norm.backward import BackwardKernel, backward_kernel
from ..norm.forward import Kernel, row_kernel
from ..norm.spec import Norm

__all__ = ["prepare", "prepare_backward"]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker."""
    return row_kernel(norm, width)


def prepare_backward(norm: Norm, width: int, device: str = "cpu") -> BackwardKernel:
    """Return a backward kernel for one worker."""
    return backward_kernel(norm, width)
