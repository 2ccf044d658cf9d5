"""Tables for people: boxes and colour in a terminal, plain aligned columns anywhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..errors import printable

__all__ = ["Table", "draw_boxed", "draw_markdown", "draw_plain", "fits", "number"]


class Table(NamedTuple):
    """Cells as text, row by row under the columns' names, between lines of text above and below.

    gap is the number of the row before which rows were left out; align is where cells stand: left or
    right, or an l or r for each column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    gap: int | None = None
    align: str = "right"

    @property
    def sides(self) -> list[Literal["left", "right"]]:
        """Where the cells of each column stand."""
        letters = self.align[0] * len(self.columns) if self.align in ("left", "right") else self.align
        return ["right" if letter == "r" else "left" for letter in letters]


def number(value: float) -> str:
    """Return a number for people: six significant digits.

    >>> number(0.1 + 0.2), number(float("nan"))
    ('0.3', 'NaN')
    """
    return f"{value:.6g}".replace("nan", "NaN")


def draw_plain(table: Table) -> str:
    """Return the table as aligned columns, nothing cut or wrapped, for pipes and files."""
    widths = _widths(table)
    body = (
        "  ".join(
            _aligned(printable(cell), width, side)
            for cell, width, side in zip(row, widths, table.sides, strict=True)
        )
        for row in (table.columns, *table.rows)
    )
    lines = (*map(printable, table.above), *body, *map(printable, table.below))
    return _joined([line.rstrip() for line in lines])


def draw_markdown(table: Table) -> str:
    """Return the table in GitHub's markdown, between the lines above and below as paragraphs."""
    lines = [
        table.columns,
        ["---:" if side == "right" else "---" for side in table.sides],
        *([_unmarked(cell) for cell in row] for row in table.rows),
    ]
    body = [f"| {' | '.join(line)} |" for line in lines]
    above = [text for line in table.above for text in (_unmarked(line), "")]
    below = [text for line in table.below for text in ("", _unmarked(line))]
    return _joined((*above, *body, *below))


def draw_boxed(table: Table, width: int, colour: bool, unicode: bool) -> str:
    """Return the table in a box for a terminal of that width.

    Text that is too wide is folded; a table of numbers is plain where its box would not fit.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if table.align != "left" and not fits(table, width):
        return draw_plain(table)
    grid = RichTable(box=box.ROUNDED if unicode else box.ASCII, header_style="bold")
    for column, side in zip(table.columns, table.sides, strict=True):
        grid.add_column(Text(column), justify=side, overflow="fold")
    for index, row in enumerate(table.rows):
        if index == table.gap:
            grid.add_row(*["⋮" if unicode else ":"] * len(table.columns), style="dim")
        grid.add_row(*(Text(printable(cell)) for cell in row))
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system="standard" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
    )
    for line in table.above:
        console.print(Text(printable(line), overflow="fold"))
    console.print(grid)
    for line in table.below:
        console.print(Text(printable(line), overflow="fold"))
    return out.getvalue()


def fits(table: Table, width: int) -> bool:
    """Return whether the table's box is at most so wide."""
    widths = _widths(table)
    return sum(widths) + 3 * len(widths) + 1 <= width


def _unmarked(text: str) -> str:
    """Text whose characters markdown takes as they are."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", printable(text))


def _aligned(cell: str, width: int, align: str) -> str:
    return cell.rjust(width) if align == "right" else cell.ljust(width)


def _widths(table: Table) -> list[int]:
    columns = zip(table.columns, *table.rows, strict=True)
    return [max(len(printable(cell)) for cell in column) for column in columns]


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
