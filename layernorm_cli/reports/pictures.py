"""What the pictures share: which files there are, one style, the same bytes each time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ..errors import MissingEngine, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STYLE", "SUFFIXES", "check_picture", "file_bytes"]

SUFFIXES = (".png", ".svg")
INSTALL = "pip install 'layernorm[plot]'"
STYLE: dict[str, Any] = {"svg.hashsalt": "layernorm", "text.parse_math": False, "font.size": 9}


def check_picture(path: str) -> None:
    """Find before the work what drawing would raise; Raises UsageError, MissingEngine."""
    if not path.endswith(SUFFIXES):
        raise UsageError(path, "not a kind of picture", f"a name ending in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingEngine("--plot", "matplotlib is not installed", None, INSTALL) from None


def file_bytes(figure: Figure, path: str) -> bytes:
    """Return a figure as the bytes of a .png or .svg file, as path ends; the same ones each time."""
    file = io.BytesIO()
    form = path.rpartition(".")[2]
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()
