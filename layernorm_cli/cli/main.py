"""The program: its commands, and how it ends, with an exit code and at most three lines of error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from .. import __version__
from ..errors import Interrupted, LayernormError, PipeClosed, printable
from . import apply, backends, batch, bench, explain, grad, inspect, verify
from .terminal import flush

__all__ = ["app", "main"]

TRUE = ("1", "true", "t", "yes", "y", "on")

app = typer.Typer(
    name="layernorm",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _examples(lines: tuple[str, ...]) -> str:
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"layernorm {__version__}")
        raise typer.Exit()


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Layer normalization on tensor files: .npy, .npz and .safetensors of any size."""


app.command(epilog=_examples(apply.EXAMPLES))(apply.apply)
app.command(epilog=_examples(batch.EXAMPLES))(batch.batch)
app.command(epilog=_examples(inspect.EXAMPLES))(inspect.inspect)
app.command(epilog=_examples(verify.EXAMPLES))(verify.verify)
app.command(epilog=_examples(explain.EXAMPLES))(explain.explain)
app.command(epilog=_examples(grad.EXAMPLES))(grad.grad)
app.command(epilog=_examples(bench.EXAMPLES))(bench.bench)
app.command(epilog=_examples(backends.EXAMPLES))(backends.backends)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 no, 2 usage, 3 input or output, 4 not installed."""
    _prepare_process()
    debug = "--debug" in sys.argv or os.environ.get("LAYERNORM_DEBUG", "").lower() in TRUE
    try:
        code = app(prog_name="layernorm", standalone_mode=False) or 0
        flush()
    except (LayernormError, TyperException) as error:
        if debug:
            raise
        code = error.exit_code
        message = str(error) if isinstance(error, LayernormError) else _usage(error)
        _complain(message)
    except Interrupted as interruption:
        code = interruption.exit_code
    except PipeClosed as closed:
        code = closed.exit_code
        _forget_stdout()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = PipeClosed.exit_code  # typer's own printing met the closed pipe
        _forget_stdout()
    except MemoryError:
        if debug:
            raise
        code = 3
        _complain("not enough memory\n  try: fewer --threads")
    except OSError as error:
        if debug:
            raise
        code = 3
        _complain(printable(str(error)))
    sys.exit(code)


def _prepare_process() -> None:
    """Set up signals and streams; and keep numpy's BLAS from starting threads that nobody needs."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for fd in range(3):  # an output file must not become somebody's closed standard stream
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _usage(error: TyperException) -> str:
    """An error of the option parser in our three lines."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "layernorm"
    return f"{printable(error.format_message())}\n  try: {command} --help"


def _complain(message: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"layernorm: {message}", file=sys.stderr)


def _forget_stdout() -> None:
    """Let Python's own flush at exit go nowhere, instead of complaining about the closed pipe."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
