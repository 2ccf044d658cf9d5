"""Rows in a report: which are shown, each in its line, all in a summary and in warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..norm.dtypes import DType
from ..norm.spec import Norm
from ..pipeline import Block, Summary
from ..results import Range, RowSummary, TableRow

__all__ = ["EMPTY", "all_rows", "indices_of", "row_summary", "row_warnings", "shown_rows", "table_rows"]

EMPTY = Summary(*(math.nan,) * 4, 0, 0, 0, None, None)


def all_rows(start: int, stop: int) -> npt.NDArray[np.intp]:
    """Show every row of a block."""
    return np.arange(stop - start)


def shown_rows(rows: int, count: int | None) -> Callable[[int, int], npt.NDArray[np.intp]]:
    """Return a function that says which rows of a block to show: the first and last count / 2 of all."""
    if count is None or count >= rows:
        return all_rows
    first, last = -(-count // 2), rows - count // 2

    def shown(start: int, stop: int) -> npt.NDArray[np.intp]:
        indices = np.arange(stop - start)
        return indices[(indices + start < first) | (indices + start >= last)]

    return shown


def table_rows(
    block: Block, wanted: npt.NDArray[np.intp], leading: tuple[int, ...]
) -> Iterator[TableRow]:
    """Yield a line for each of the wanted rows, counted from the first of all, which the block shows."""
    picked = np.searchsorted(block.places, wanted)
    values = block.columns[:, picked].T.tolist()
    for place, (mean, var, _, mean_after, var_after) in zip(wanted.tolist(), values, strict=True):
        yield TableRow(indices_of(place, leading), mean, var, mean_after, var_after)


def indices_of(row: int, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading indices of a row that is counted in C order."""
    return tuple(int(i) for i in np.unravel_index(row, leading)) if leading else ()


def row_summary(summary: Summary) -> RowSummary:
    """Return all rows in a few numbers."""
    return RowSummary(
        _range(summary.mean_min, summary.mean_max),
        _range(summary.var_min, summary.var_max),
        summary.constant_rows,
        summary.nonfinite_rows,
    )


def _range(least: float, greatest: float) -> Range:
    return Range(None, None) if math.isnan(least) else Range(least, greatest)


def row_warnings(
    summary: Summary, x: str, norm: Norm, dtype: DType, leading: tuple[int, ...]
) -> Iterator[str]:
    """Yield what to warn of: rows that are NaN in the output, results too large for its dtype."""
    if summary.first_nonfinite is not None:
        where = indices_of(summary.first_nonfinite, leading)
        yield (
            f"{x}: {_count(summary.nonfinite_rows, 'row')} with NaN or inf, "
            f"all NaN in the output; the first is row {where}"
        )
    if norm.eps == 0 and norm.kind == "layer" and summary.first_constant is not None:
        where = indices_of(summary.first_constant, leading)
        yield (
            f"{x}: {_count(summary.constant_rows, 'constant row')}, "
            f"all NaN in the output since eps is 0; the first is row {where}"
        )
    if summary.overflow:
        yield f"{x}: {_count(summary.overflow, 'result')} too large for {dtype.name}, now inf"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
