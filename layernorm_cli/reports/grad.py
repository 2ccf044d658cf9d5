"""The gradients of a layer norm, as a table, json or markdown; its rows as those of apply."""

from __future__ import annotations

from ..results import GradResult, ParameterStats
from .apply import KINDS
from .strict_json import to_json
from .tables import Table, number

__all__ = ["grad_json", "grad_table"]

COLUMNS = ("row", "mean x", "var x", "mean dx", "var dx")


def grad_json(result: GradResult) -> str:
    """Return the whole result as one JSON object on indented lines."""
    fields = result._asdict()
    del fields["warnings"]  # they go to standard error
    return to_json(fields, indent=2) + "\n"


def grad_table(result: GradResult) -> Table:
    """Return the rows shown as a table, what was computed above it, and the sums over rows below."""
    hidden = result.rows - len(result.table)
    rows = [
        (", ".join(map(str, row.row)), *(number(value) for value in row[1:])) for row in result.table
    ]
    gap = -(-len(rows) // 2) if hidden and rows else None
    return Table(COLUMNS, rows, _above(result), _below(result, hidden), gap)


def _above(result: GradResult) -> list[str]:
    tensor = f" ({result.tensor})" if result.tensor else ""
    offset = f" + {result.gamma_offset:g}" if result.gamma_offset else ""
    lines = [
        f"{result.input}{tensor}: {result.dtype} {result.shape}, "
        f"{result.rows} row{'s' * (result.rows != 1)}; dy {result.upstream}",
        f"gradients of the {KINDS[result.kind]} over axis {result.axis}, "
        f"eps {result.eps:g} ({result.eps_source}), "
        f"{f'gamma {result.gamma}' if result.gamma else 'no gamma'}{offset}; engine {result.backend}",
    ]
    if result.output is not None:
        lines.append(f"output {result.output}: dx {result.output_dtype}, dgamma, dbeta")
    return lines


def _below(result: GradResult, hidden: int) -> list[str]:
    lines = []
    if hidden:
        lines.append(f"{hidden} of {result.rows} rows not shown; --rows all shows them")
    lines += [
        f"dgamma (sum of dy * xhat): {_range(result.dgamma_stats)}",
        f"dbeta (sum of dy): {_range(result.dbeta_stats)}",
    ]
    summary = result.summary
    for count, what in (
        (summary.constant_rows, "constant"),
        (summary.nonfinite_rows, "with NaN or inf"),
    ):
        if count:
            lines.append(f"rows {what}: {count}")
    if result.check is not None:
        check = result.check
        lines.append(
            f"against finite differences in {check.directions} "
            f"direction{'s' * (check.directions != 1)}, {check.rows} rows: relative error "
            f"dx {check.dx:.1e}, dgamma {check.dgamma:.1e}, dbeta {check.dbeta:.1e}"
        )
    return lines


def _range(stats: ParameterStats) -> str:
    return f"norm {number(stats.norm)}, {number(stats.min)} to {number(stats.max)}"
