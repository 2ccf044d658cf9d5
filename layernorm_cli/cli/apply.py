"""layernorm apply X"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o

if TYPE_CHECKING:
    from ..tasks.apply import ApplyRequest

__all__ = ["EXAMPLES", "apply"]

EXAMPLES = (
    "layernorm apply x.npy --eps 1e-5 -o y.npy",
    "layernorm apply acts.safetensors#h.0.ln_1.input --gamma gamma.npy --beta beta.npy",
    "layernorm apply - -o - < x.npy > y.npy",
)


def apply(
    x: o.X,
    gamma: o.Gamma = None,
    beta: o.Beta = None,
    params: o.Params = None,
    site: o.Site = None,
    all_sites: Annotated[
        bool,
        typer.Option(
            "--all-sites",
            envvar="LAYERNORM_ALL_SITES",
            help="Every site of the checkpoint, on its own tensor of X: a line each.",
        ),
    ] = False,
    match: Annotated[
        str,
        typer.Option(
            "--match",
            metavar="PATTERN",
            envvar="LAYERNORM_MATCH",
            help="How X calls the tensor of a site, with --all-sites.",
        ),
    ] = "{site}.input",
    eps: o.Eps = None,
    kind: o.Kind = None,
    gamma_offset: o.GammaOffset = None,
    axis: o.Axis = -1,
    residual: o.Residual = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            envvar="LAYERNORM_OUTPUT",
            help="Write the result: .npy, .safetensors, or - for npy to standard output.",
        ),
    ] = None,
    sum_out: o.SumOut = None,
    save_stats: o.SaveStats = None,
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
    """Normalize the rows of a tensor.

    Prints their mean and var before and after. The statistics are float64 and the population's; the
    result is rounded once. Memory does not depend on the file's size.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import parse_eps
    from ..reports.apply import apply_json, apply_table, csv_header, csv_line, jsonl_line
    from ..reports.tables import draw_markdown
    from ..results import TableRow
    from ..tasks.apply import ApplyRequest
    from ..tasks.apply import apply as run
    from ..tensorfiles.outputs import STDOUT, canonical
    from ..tensorfiles.refs import without_secrets
    from .terminal import print_table, progress_bar, warn, write

    lines = {o.FormatName.csv: csv_line, o.FormatName.jsonl: jsonl_line}.get(format)
    request = ApplyRequest(
        x=x,
        gamma=gamma,
        beta=beta,
        params=params,
        site=site,
        residual=residual,
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
        sum_out=canonical(sum_out),
        save_stats=save_stats,
        rows=o.n_or_all("--rows", rows, None if lines else 10),
        force=force,
    )
    if all_sites:
        apply_to_all_sites(request, match, format, quiet, progress)
        return
    silent = quiet or STDOUT in (request.output, request.sum_out)
    if lines is not None and not silent:
        if format == o.FormatName.csv:
            write(csv_header())

        def on_row(row: TableRow) -> None:
            write(lines(row))

    with progress_bar(False if quiet else progress, without_secrets(x)) as on_progress:
        result = run(request, on_row if lines is not None and not silent else None, on_progress)
    if not silent:
        if format == o.FormatName.table:
            print_table(apply_table(result))
        elif format == o.FormatName.markdown:
            write(draw_markdown(apply_table(result)))
        elif format == o.FormatName.json:
            write(apply_json(result))
    if not quiet:
        for message in result.warnings:
            warn(message)


def apply_to_all_sites(
    request: ApplyRequest, match: str, format: o.FormatName, quiet: bool, progress: bool | None
) -> None:
    """Normalize every site's tensor, and print a line each."""
    from ..reports.apply_sites import sites_csv, sites_json, sites_jsonl, sites_table
    from ..reports.tables import draw_markdown
    from ..tasks.apply_sites import apply_sites
    from .terminal import print_table, progress_bar, warn, write

    with progress_bar(False if quiet else progress, request.x) as on_progress:
        result = apply_sites(request, match, on_progress)
    texts = {
        o.FormatName.json: sites_json,
        o.FormatName.jsonl: sites_jsonl,
        o.FormatName.csv: sites_csv,
    }
    if quiet:
        return
    if format in texts:
        write(texts[format](result))
    elif format == o.FormatName.markdown:
        write(draw_markdown(sites_table(result)))
    else:
        print_table(sites_table(result))
    for message in result.warnings:
        warn(message)
