"""Standard output and error: who is reading, and what they can show."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import OutputError, PipeClosed, printable
from ..reports.tables import Table, draw_boxed, draw_plain

__all__ = ["columns", "flush", "print_table", "progress_bar", "shows_blocks", "warn", "write"]


def write(text: str) -> None:
    """Write text to standard output.

    Raises PipeClosed where nobody reads it any more, OutputError where it cannot be written.
    """
    if sys.stdout is not None:
        with _stdout_errors():
            sys.stdout.write(text)


def flush() -> None:
    """Write what standard output still holds back; Raises as write."""
    if sys.stdout is not None:
        with _stdout_errors():
            sys.stdout.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise PipeClosed from None
    except OSError as error:
        raise OutputError("standard output", (error.strerror or str(error)).lower()) from None


def warn(message: str) -> None:
    """Write a warning to standard error."""
    print(f"layernorm: warning: {printable(message)}", file=sys.stderr)


def print_table(table: Table) -> None:
    """Print a table: in a box if a terminal shows it, else as plain columns."""
    width = columns()
    if width is None:
        write(draw_plain(table))
        return
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    write(draw_boxed(table, width, colour, shows_blocks()))


def columns() -> int | None:
    """Return how wide the terminal is that standard output goes to; None where it goes elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def shows_blocks() -> bool:
    """Return whether standard output is a terminal that has characters for boxes and blocks."""
    return (
        sys.stdout is not None and sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()
    )


@contextmanager
def progress_bar(wanted: bool | None, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told the rows done and in all, and draws a bar on standard error.

    Unless wanted is True, the bar is drawn only in a terminal, and for work of over a second.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (terminal if wanted is None else wanted) or sys.stderr is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    patience = time.monotonic() + (0 if wanted else 1)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=Console(
            file=sys.stderr,
            force_terminal=terminal,
            color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        ),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(printable(what), total=None)

    def advance(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() >= patience:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
