"""Result records: what tasks return and reports print; fields are named as the JSON keys."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ApplyResult", "Range", "RowSummary", "TableRow"]


class TableRow(NamedTuple):
    """One row of x: its leading indices, and its mean and var before and after."""

    row: tuple[int, ...]
    mean_before: float
    var_before: float
    mean_after: float
    var_after: float


class Range(NamedTuple):
    """The least and greatest over the rows without NaN and inf; None without such rows."""

    min: float | None
    max: float | None


class RowSummary(NamedTuple):
    """All rows in a few numbers."""

    mean_before: Range
    var_before: Range
    constant_rows: int
    nonfinite_rows: int


class ApplyResult(NamedTuple):
    """What apply did; table holds the rows shown, summary speaks of all."""

    input: str
    tensor: str | None
    output: str | None
    shape: tuple[int, ...]
    dtype: str
    output_dtype: str
    kind: str
    axis: int
    eps: float
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float
    backend: str
    rows: int
    table: tuple[TableRow, ...]
    summary: RowSummary
    warnings: tuple[str, ...]
