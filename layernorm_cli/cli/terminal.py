"""Standard output and error: who is reading, and what they can show."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import OutputError, PipeClosed, printable
from ..reports.tables import Table, draw_boxed, draw_plain

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = [
    "columns",
    "files_bar",
    "flush",
    "print_table",
    "progress_bar",
    "shows_blocks",
    "stdout_is_terminal",
    "warn",
    "write",
]


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
    return shutil.get_terminal_size().columns if stdout_is_terminal() else None


def shows_blocks() -> bool:
    """Return whether standard output is a terminal that has characters for boxes and blocks."""
    return stdout_is_terminal() and "utf" in (sys.stdout.encoding or "").lower()


def stdout_is_terminal() -> bool:
    """Return whether a person reads standard output."""
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def progress_bar(wanted: bool | None, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told the rows done and in all, and draws a bar on standard error.

    Unless wanted is True, the bar is drawn only in a terminal, and for work of over a second.
    """
    if not _shows_bar(wanted):
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
    ]
    with _drawn(columns, wanted) as advance:
        yield lambda done, total: advance(done, total, what)


@contextmanager
def files_bar(wanted: bool | None) -> Iterator[Callable[[int, int, int, int], None]]:
    """Yield a function that is told files and bytes done, and both in all; as progress_bar."""
    if not _shows_bar(wanted):
        yield lambda files, size, all_files, all_bytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with _drawn(columns, wanted) as advance:
        yield lambda files, size, all_files, all_bytes: advance(
            size, all_bytes, f"{files}/{all_files} files"
        )


def _shows_bar(wanted: bool | None) -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() if wanted is None else wanted)


@contextmanager
def _drawn(
    columns: Sequence[ProgressColumn], wanted: bool | None
) -> Iterator[Callable[[int, int, str], None]]:
    """A function that is told what is done, all, and of what; it draws ten times a second at most.

    No thread of rich's own draws: processes that fork later could not be sure of its locks.
    """
    from rich.console import Console
    from rich.progress import Progress

    terminal = sys.stderr.isatty()
    next_time = time.monotonic() + (0 if wanted else 1)
    bar = Progress(
        *columns,
        console=Console(
            file=sys.stderr,
            force_terminal=terminal,
            color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        ),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("", total=None)
    told: tuple[int, int | None, str] = (0, None, "")

    def draw() -> None:
        done, total, what = told
        bar.update(task, completed=done, total=total, description=printable(what))
        if bar.live.is_started:
            bar.refresh()
        else:
            bar.start()

    def advance(done: int, total: int, what: str) -> None:
        nonlocal next_time, told
        told = done, total, what
        now = time.monotonic()
        if now >= next_time:
            next_time = now + 0.1
            draw()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            draw()
            bar.stop()
