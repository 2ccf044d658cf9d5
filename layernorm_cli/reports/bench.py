"""Engines side by side, as a table or json."""

from __future__ import annotations

from ..results import BenchResult
from .strict_json import to_json
from .tables import Table, number

__all__ = ["bench_json", "bench_table"]

COLUMNS = ("backend", "seconds", "GB/s", "ratio to copy", "exact", "max abs error", "peak MB")


def bench_json(result: BenchResult) -> str:
    """Return all cases as one JSON object on indented lines."""
    return to_json(result, indent=2) + "\n"


def bench_table(result: BenchResult) -> Table:
    """Return one row an engine; exact and error are those of the worst distribution."""
    rows = [
        (
            case.backend,
            _or_dash(case.seconds),
            _or_dash(case.gb_per_s),
            _or_dash(case.ratio_to_copy),
            f"{case.exact_fraction:.4%}",
            number(case.max_abs_error),
            f"{case.peak_rss_mb:.0f}",
        )
        for case in result.cases
    ]
    wrong = [f"{case.backend} is wrong: {case.wrong}" for case in result.cases if case.wrong]
    note = "exact: results correctly rounded, on the worst of the distributions; with its error"
    return Table(COLUMNS, rows, (result.measured,), (note, *wrong))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
