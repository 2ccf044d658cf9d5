"""Result records: what tasks return and reports print; fields are named as the JSON keys."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ApplyResult",
    "BackendInfo",
    "BenchCase",
    "BenchResult",
    "Exactness",
    "Range",
    "RowSummary",
    "TableRow",
]


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


class BackendInfo(NamedTuple):
    """What there is to know of one engine; version is None where it is not installed."""

    backend: str
    version: str | None
    exactness: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    install: str


class Exactness(NamedTuple):
    """How near an engine's results are on one distribution: the fraction that is correctly rounded."""

    distribution: str
    exact_fraction: float
    max_abs_error: float


class BenchCase(NamedTuple):
    """One engine at work: seconds are the median of several passes.

    ratio_to_copy: to copying as many bytes. exact_fraction and max_abs_error are the worst of the
    distributions. peak_rss_mb: of a process that does nothing else. wrong: why the engine's results
    are out of bounds, and then it has no time.
    """

    backend: str
    dtype: str
    shape: tuple[int, ...]
    seconds: float | None
    gb_per_s: float | None
    ratio_to_copy: float | None
    exact_fraction: float
    max_abs_error: float
    peak_rss_mb: float
    wrong: str | None
    distributions: tuple[Exactness, ...]


class BenchResult(NamedTuple):
    """All engines' cases, and what was measured in words."""

    measured: str
    cases: tuple[BenchCase, ...]
