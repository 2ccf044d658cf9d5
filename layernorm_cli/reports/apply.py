"""What apply saw, as a table, json, jsonl, csv or markdown."""

from __future__ import annotations

from ..results import ApplyResult, Range, TableRow
from .strict_json import to_json
from .tables import Table, number

__all__ = ["apply_json", "apply_table", "csv_header", "csv_line", "jsonl_line"]

COLUMNS = ("row", "mean before", "var before", "mean after", "var after")
KINDS = {"layer": "layer norm", "rms": "rms norm (var is the mean square)"}
CSV_COLUMNS = ("row", "mean_before", "var_before", "mean_after", "var_after")


def apply_json(result: ApplyResult) -> str:
    """Return the whole result as one JSON object on indented lines."""
    fields = result._asdict()
    del fields["warnings"]  # they go to standard error
    return to_json(fields, indent=2) + "\n"


def jsonl_line(row: TableRow) -> str:
    """Return one row of the table as a line of JSON."""
    return to_json(row) + "\n"


def csv_header() -> str:
    """Return the first line of the csv."""
    return ",".join(CSV_COLUMNS) + "\n"


def csv_line(row: TableRow) -> str:
    """Return one row of the table as a line of csv, its index joined with commas."""
    index = ",".join(map(str, row.row))
    numbers = (row.mean_before, row.var_before, row.mean_after, row.var_after)
    return ",".join((f'"{index}"' if "," in index else index, *map(repr, numbers))) + "\n"


def apply_table(result: ApplyResult) -> Table:
    """Return the rows shown as a table, with what was computed above it and all rows' ranges below."""
    hidden = result.rows - len(result.table)
    first = -(-len(result.table) // 2)
    rows = [
        (
            ", ".join(map(str, row.row)),
            number(row.mean_before),
            number(row.var_before),
            number(row.mean_after),
            number(row.var_after),
        )
        for row in result.table
    ]
    return Table(
        COLUMNS,
        rows,
        _above(result),
        _below(result, hidden),
        first if hidden and rows else None,
    )


def _above(result: ApplyResult) -> list[str]:
    tensor = f" ({result.tensor})" if result.tensor else ""
    parameters = ", ".join(
        f"{name} {ref}" for name, ref in (("gamma", result.gamma), ("beta", result.beta)) if ref
    )
    offset = f" + {result.gamma_offset:g}" if result.gamma_offset else ""
    lines = [
        f"{result.input}{tensor}: {result.dtype} {result.shape}, "
        f"{result.rows} row{'s' * (result.rows != 1)}",
        f"{KINDS[result.kind]} over axis {result.axis}, "
        f"eps {result.eps:g} ({result.eps_source}), {parameters or 'no gamma, no beta'}{offset}; "
        f"engine {result.backend}",
    ]
    if result.output is not None:
        lines.append(f"output {result.output}: {result.output_dtype}")
    return lines


def _below(result: ApplyResult, hidden: int) -> list[str]:
    lines = []
    if hidden:
        lines.append(f"{hidden} of {result.rows} rows not shown; --rows all shows them")
    summary = result.summary
    lines.append(
        f"all rows before: mean {_range(summary.mean_before)}, var {_range(summary.var_before)}"
    )
    for count, what in (
        (summary.constant_rows, "constant"),
        (summary.nonfinite_rows, "with NaN or inf"),
    ):
        if count:
            lines.append(f"rows {what}: {count}")
    return lines


def _range(values: Range) -> str:
    if values.min is None or values.max is None:
        return "none"
    return f"{number(values.min)} to {number(values.max)}"
