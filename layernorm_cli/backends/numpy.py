"""The numpy engine: the reference itself."""

from __future__ import annotations

from ..norm.forward import row_kernel as prepare

__all__ = ["HOLDS_GIL", "prepare"]

HOLDS_GIL = True
