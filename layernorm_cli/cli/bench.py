"""layernorm bench"""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UsageError
from . import options as o

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = (
    "layernorm bench --rows 1000",
    "layernorm bench x.npy --backend numpy --format json",
    "layernorm bench --file --rows 1000 --backend numpy",
)


def bench(
    x: Annotated[
        str | None,
        typer.Argument(metavar="X", help="Rows to measure with; generated ones if not given."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="An engine, again for more; all installed."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", metavar="N", parser=o.count, help="How many rows; 64 MB of float32."),
    ] = None,
    width: Annotated[
        int, typer.Option("--width", metavar="D", parser=o.count, help="Features of generated rows.")
    ] = 768,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="The dtype of generated rows.")
    ] = "float32",
    kind: o.Kind = None,
    eps: o.Eps = None,
    device: o.Device = "cpu",
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", parser=o.count, help="Passes to take the median of.")
    ] = 5,
    file: Annotated[
        bool, typer.Option("--file", help="Whole processes from file to file, against cp.")
    ] = False,
    format: o.Format = o.FormatName.table,
    debug: o.Debug = False,
) -> None:
    """Compare engines side by side.

    Prints speed against a copy, memory, and how many results are correctly rounded. Each engine runs
    in a process of its own. The distributions of the check are standard normal rows, and such with a
    large mean, a tiny spread, an outlier feature, and tiny and huge scales.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import DEFAULT_EPS, parse_eps
    from ..reports.bench import bench_json, bench_table
    from ..reports.tables import draw_markdown
    from ..tasks.bench import BenchRequest
    from ..tasks.bench import bench as run
    from .terminal import print_table, write

    if format in (o.FormatName.csv, o.FormatName.jsonl):
        raise UsageError("--format", f"no {format.value} of a bench", "table, json or markdown")
    result = run(
        BenchRequest(
            x=x,
            backends=tuple(backend or ()),
            rows=rows,
            width=width,
            dtype=float_dtype(dtype),
            kind=kind.value if kind else "layer",
            eps=DEFAULT_EPS if eps is None else parse_eps(eps),
            device=device,
            repeat=repeat,
            file=file,
        )
    )
    if format == o.FormatName.table:
        print_table(bench_table(result))
    elif format == o.FormatName.markdown:
        write(draw_markdown(bench_table(result)))
    else:
        write(bench_json(result))
