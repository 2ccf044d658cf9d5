"""The numpy engine: the reference itself."""

from __future__ import annotations

from ..norm.forward import Kernel, row_kernel
from ..norm.spec import Norm

__all__ = ["prepare"]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker."""
    return row_kernel(norm, width)
