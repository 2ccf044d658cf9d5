"""Layer normalization on tensor files: the public Python API.

Names are imported when first used, so that the command line starts without numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Explanation": "norm.explanation",
    "Gradients": "norm.backward",
    "LayernormError": "errors",
    "RowStats": "norm.forward",
    "Site": "checkpoints.sites",
    "Tensor": "tensorfiles.reader",
    "Verdict": "norm.verification",
    "explain": "norm.explanation",
    "find_sites": "checkpoints.survey",
    "layer_norm": "norm.arrays",
    "layer_norm_backward": "norm.backward",
    "open_tensor": "tensorfiles.reader",
    "row_stats": "norm.arrays",
    "verify": "norm.verification",
}

__all__ = [
    "Explanation",
    "Gradients",
    "LayernormError",
    "RowStats",
    "Site",
    "Tensor",
    "Verdict",
    "__version__",
    "explain",
    "find_sites",
    "layer_norm",
    "layer_norm_backward",
    "open_tensor",
    "row_stats",
    "verify",
]

if TYPE_CHECKING:
    from .checkpoints.sites import Site
    from .checkpoints.survey import find_sites
    from .errors import LayernormError
    from .norm.arrays import layer_norm, row_stats
    from .norm.backward import Gradients, layer_norm_backward
    from .norm.explanation import Explanation, explain
    from .norm.forward import RowStats
    from .norm.verification import Verdict, verify
    from .tensorfiles.reader import Tensor, open_tensor


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
