"""Which engines there are, as a table or json."""

from __future__ import annotations

from collections.abc import Sequence

from ..results import BackendInfo
from .strict_json import to_json
from .tables import Table

__all__ = ["backends_json", "backends_table"]

COLUMNS = ("backend", "version", "results", "dtypes", "devices", "install")


def backends_json(infos: Sequence[BackendInfo]) -> str:
    """Return all engines as one JSON object on indented lines."""
    return to_json({"backends": infos}, indent=2) + "\n"


def backends_table(infos: Sequence[BackendInfo]) -> Table:
    """Return one row an engine."""
    rows = [
        (
            info.backend,
            info.version or "not installed",
            info.exactness,
            " ".join(info.dtypes),
            " ".join(info.devices),
            info.install,
        )
        for info in infos
    ]
    return Table(COLUMNS, rows, align="left")
