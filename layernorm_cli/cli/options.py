"""The options that commands share, each defined once, each with its environment variable."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import typer

from ..errors import UsageError

__all__ = [
    "AssumeDtype",
    "Atol",
    "Axis",
    "Backend",
    "Beta",
    "DType",
    "Debug",
    "Device",
    "Eps",
    "Force",
    "Format",
    "FormatName",
    "Gamma",
    "GammaOffset",
    "Kind",
    "KindName",
    "Params",
    "Progress",
    "Quiet",
    "Residual",
    "Rows",
    "Rtol",
    "SaveStats",
    "Site",
    "SumOut",
    "Threads",
    "X",
    "count",
    "indices",
    "n_or_all",
    "not_negative",
    "tolerance",
    "whole_number",
]


class KindName(str, Enum):
    """The kinds of norm."""

    layer = "layer"
    rms = "rms"


class FormatName(str, Enum):
    """The forms of a report."""

    table = "table"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"
    markdown = "markdown"


def whole_number(text: str | int) -> int:
    """Parse an option's number, or its default; Raises BadParameter that shows what was found."""
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", str(text)):  # int() would take 1_0 too
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(text)


def count(text: str | int) -> int:
    """Parse an option's number of 1 or more; Raises BadParameter that shows what was found."""
    number = whole_number(text)
    if number < 1:
        raise typer.BadParameter(f"{text!r} is not 1 or more")
    return number


def not_negative(text: str | int) -> int:
    """Parse an option's number of 0 or more; Raises BadParameter that shows what was found."""
    number = whole_number(text)
    if number < 0:
        raise typer.BadParameter(f"{text!r} is not 0 or more")
    return number


def indices(option: str, text: str) -> tuple[int, ...]:
    """Return the index that a user typed, such as 5 or 1,3; Raises UsageError for anything else."""
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*(,\s*[+-]?[0-9]+\s*)*", text):
        raise UsageError(f"{option} {text!r}", "not an index", "a number, or several such as 1,3")
    return tuple(map(int, text.split(",")))


def n_or_all(option: str, text: str | None, default: int | None) -> int | None:
    """Return how many to print, None for all; Raises UsageError for what is no number or all."""
    if text is None:
        return default
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        what = option.removeprefix("--")
        raise UsageError(f"{option} {text!r}", f"not a number of {what}", "0 or more, or all")
    return int(text)


def tolerance(text: str | float) -> float:
    """Parse an option's number of 0 or more; Raises BadParameter that shows what was found."""
    # float() would take inf and 1_0 too
    if not re.fullmatch(r"\s*\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", str(text)):
        raise typer.BadParameter(f"{text!r} is not a number of 0 or more")
    return float(text)


X = Annotated[
    str,
    typer.Argument(metavar="X", help="The activations: FILE, FILE#TENSOR, or - for standard input."),
]
Gamma = Annotated[
    str | None,
    typer.Option("--gamma", metavar="REF", envvar="LAYERNORM_GAMMA", help="Gain, one per feature."),
]
Beta = Annotated[
    str | None,
    typer.Option("--beta", metavar="REF", envvar="LAYERNORM_BETA", help="Bias, one per feature."),
]
Params = Annotated[
    str | None,
    typer.Option(
        "--params",
        metavar="CKPT",
        envvar="LAYERNORM_PARAMS",
        help="Take gamma, beta, eps, kind and offset from this checkpoint.",
    ),
]
Site = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME",
        envvar="LAYERNORM_SITE",
        help="The norm in the checkpoint: its name, or a unique end of it.",
    ),
]
Residual = Annotated[
    str | None,
    typer.Option(
        "--residual",
        metavar="REF",
        envvar="LAYERNORM_RESIDUAL",
        help="Normalize X plus this tensor.",
    ),
]
Eps = Annotated[
    str | None,
    typer.Option(
        "--eps",
        metavar="NUMBER",
        envvar="LAYERNORM_EPS",
        help="The constant under the root; 1e-5 if nothing says it.",
    ),
]
Kind = Annotated[
    KindName | None,
    typer.Option(
        "--kind", envvar="LAYERNORM_KIND", help="layer (the default) subtracts the mean, rms does not."
    ),
]
GammaOffset = Annotated[
    float | None,
    typer.Option(
        "--gamma-offset",
        metavar="0|1",
        envvar="LAYERNORM_GAMMA_OFFSET",
        help="1 for files that store gamma - 1, as Gemma's do.",
    ),
]
Rtol = Annotated[
    float | None,
    typer.Option(
        "--rtol",
        metavar="NUMBER",
        parser=tolerance,
        envvar="LAYERNORM_RTOL",
        help="Error allowed, relative to the result; what engines reach if not given.",
    ),
]
Atol = Annotated[
    float | None,
    typer.Option(
        "--atol",
        metavar="NUMBER",
        parser=tolerance,
        envvar="LAYERNORM_ATOL",
        help="Error allowed, added to that of --rtol.",
    ),
]
Axis = Annotated[
    int,
    typer.Option(
        "--axis",
        metavar="N",
        parser=whole_number,
        envvar="LAYERNORM_AXIS",
        help="Normalize over this axis and all behind it, as ONNX does.",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        envvar="LAYERNORM_BACKEND",
        help="The engine: auto, numpy, numba, torch, onnxruntime, jax.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", envvar="LAYERNORM_DEVICE", help="Where torch computes: cpu, cuda."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=count,
        envvar="LAYERNORM_THREADS",
        help="Workers at the most; as many as cores if not given.",
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        envvar="LAYERNORM_DTYPE",
        help="The output's dtype; X's own if not given.",
    ),
]
AssumeDtype = Annotated[
    str | None,
    typer.Option(
        "--assume-dtype",
        metavar="NAME",
        envvar="LAYERNORM_ASSUME_DTYPE",
        help="What untyped elements are, such as numpy's V2: bfloat16.",
    ),
]
SumOut = Annotated[
    str | None,
    typer.Option(
        "--sum-out",
        metavar="FILE",
        envvar="LAYERNORM_SUM_OUT",
        help="Write X plus the residual, before the norm.",
    ),
]
SaveStats = Annotated[
    str | None,
    typer.Option(
        "--save-stats",
        metavar="FILE",
        envvar="LAYERNORM_SAVE_STATS",
        help="Write each row's mean, var, rstd, and mean and var after (.safetensors, .csv).",
    ),
]
Format = Annotated[
    FormatName,
    typer.Option("--format", envvar="LAYERNORM_FORMAT", help="The form of the report."),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="N|all",
        envvar="LAYERNORM_ROWS",
        help="Rows to print, the first and the last; 10, or all in csv and jsonl.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="LAYERNORM_QUIET", help="Print nothing but errors."),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        envvar="LAYERNORM_PROGRESS",
        help="A progress bar; by default in a terminal, after a second.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", "-f", envvar="LAYERNORM_FORCE", help="Replace outputs that exist."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", envvar="LAYERNORM_DEBUG", help="Show the traceback of an error."),
]
