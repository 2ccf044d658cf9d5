"""layernorm grad X DY"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o

__all__ = ["EXAMPLES", "grad"]

EXAMPLES = (
    "layernorm grad x.npy dy.npy --gamma gamma.npy -o gradients.safetensors",
    "layernorm grad x.npy dy.npy --params model.safetensors --site ln_f --check 5",
)


def grad(
    x: o.X,
    dy: Annotated[
        str,
        typer.Argument(metavar="DY", help="The gradient for the output of the norm, of X's shape."),
    ],
    gamma: o.Gamma = None,
    beta: o.Beta = None,
    params: o.Params = None,
    site: o.Site = None,
    eps: o.Eps = None,
    kind: o.Kind = None,
    gamma_offset: o.GammaOffset = None,
    axis: o.Axis = -1,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            envvar="LAYERNORM_OUTPUT",
            help="Write dx, dgamma and dbeta: .safetensors.",
        ),
    ] = None,
    check: Annotated[
        int,
        typer.Option(
            "--check",
            metavar="N",
            parser=o.not_negative,
            envvar="LAYERNORM_CHECK",
            help="Compare with finite differences in N random directions.",
        ),
    ] = 0,
    dtype: o.DType = None,
    assume_dtype: o.AssumeDtype = None,
    force: o.Force = False,
    backend: o.Backend = "auto",
    device: o.Device = "cpu",
    threads: o.Threads = None,
    format: o.Format = o.FormatName.table,
    rows: o.Rows = None,
    quiet: o.Quiet = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Compute dx, dgamma and dbeta.

    The backward pass: in float64, summed over rows with compensation, each result rounded once. Prints
    mean and var of each row of X and of dx. Memory does not depend on the file's size.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import parse_eps
    from ..reports.apply import csv_header, csv_line, jsonl_line
    from ..reports.grad import grad_json, grad_table
    from ..reports.tables import draw_markdown
    from ..results import TableRow
    from ..tasks.grad import GradRequest
    from ..tasks.grad import grad as run
    from ..tensorfiles.outputs import canonical
    from ..tensorfiles.refs import without_secrets
    from .terminal import print_table, progress_bar, warn, write

    lines = {o.FormatName.csv: csv_line, o.FormatName.jsonl: jsonl_line}.get(format)
    request = GradRequest(
        x=x,
        dy=dy,
        gamma=gamma,
        beta=beta,
        params=params,
        site=site,
        eps=None if eps is None else parse_eps(eps),
        kind=kind.value if kind else None,
        gamma_offset=gamma_offset,
        axis=axis,
        backend=backend,
        device=device,
        threads=threads,
        dtype=float_dtype(dtype) if dtype else None,
        assume_dtype=float_dtype(assume_dtype) if assume_dtype else None,
        output=canonical(output),
        check=check,
        rows=o.n_or_all("--rows", rows, None if lines else 10),
        force=force,
    )
    if lines is not None and not quiet and format == o.FormatName.csv:
        write(csv_header())

    def on_row(row: TableRow) -> None:
        if lines is not None:
            write(lines(row))

    with progress_bar(False if quiet else progress, without_secrets(x)) as on_progress:
        result = run(request, on_row if lines is not None and not quiet else None, on_progress)
    if quiet:
        return
    if format == o.FormatName.table:
        print_table(grad_table(result))
    elif format == o.FormatName.markdown:
        write(draw_markdown(grad_table(result)))
    elif format == o.FormatName.json:
        write(grad_json(result))
    for message in result.warnings:
        warn(message)
