"""What a batch did: a line of JSON for each file, and a table at the end for people."""

from __future__ import annotations

from ..results import BatchResult, BatchSummary, FileRecord
from .strict_json import to_json
from .tables import Table, number

__all__ = ["batch_table", "manifest_line", "summary_line"]

COLUMNS = ("status", "files", "rows", "MB")
MOST_SHOWN = 20


def manifest_line(record: FileRecord) -> str:
    """Return one file as a line of JSON."""
    return to_json(record) + "\n"


def summary_line(summary: BatchSummary) -> str:
    """Return the last line of a manifest."""
    return to_json({"summary": summary}) + "\n"


def batch_table(result: BatchResult) -> Table:
    """Return how many files have which status, with those that failed below."""
    summary = result.summary
    rows = [
        (total.status, str(total.files), str(total.rows), number(total.bytes / 1e6))
        for total in result.totals
        if total.files or total.status == "done"
    ]
    below = [f"failed: {_reason(record)}" for record in result.failures[:MOST_SHOWN]]
    if summary.failed > MOST_SHOWN:
        below.append(f"and {summary.failed - MOST_SHOWN} more that failed; the manifest has them")
    left = summary.files - summary.done - summary.skipped - summary.failed
    if left:
        below.append(f"ended early: {left} not done")
    speed = number(summary.bytes / 1e6 / summary.seconds) if summary.seconds else "0"
    above = f"{result.output_dir}: {summary.files} files in {summary.seconds:.1f} s, {speed} MB/s"
    return Table(COLUMNS, rows, [above], below, align="lrrr")


def _reason(record: FileRecord) -> str:
    """Why a file failed, with its name; most errors begin with that."""
    error = record.error or ""
    return error if error.startswith(record.input) else f"{record.input}: {error}"
