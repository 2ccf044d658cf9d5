"""layernorm explain X"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o

__all__ = ["EXAMPLES", "explain"]

EXAMPLES = (
    "layernorm explain x.npy --row 2 --eps 0.1",
    "layernorm explain acts.safetensors#h.0.ln_1.input --gamma gamma.npy --beta beta.npy --grad 3",
    "layernorm explain x.npy --row -1 --compare-axis --format markdown",
)


def explain(
    x: o.X,
    row: Annotated[
        str,
        typer.Option(
            "--row",
            metavar="I",
            envvar="LAYERNORM_ROW",
            help="The row: its number, or its indices, 1,3; negative ones count from the end.",
        ),
    ] = "0",
    gamma: o.Gamma = None,
    beta: o.Beta = None,
    params: o.Params = None,
    site: o.Site = None,
    eps: o.Eps = None,
    kind: o.Kind = None,
    gamma_offset: o.GammaOffset = None,
    axis: o.Axis = -1,
    assume_dtype: o.AssumeDtype = None,
    grad: Annotated[
        str | None,
        typer.Option(
            "--grad",
            metavar="J",
            envvar="LAYERNORM_GRAD",
            help="How every y moves with x of this feature: dy / dx[J].",
        ),
    ] = None,
    compare_axis: Annotated[
        bool,
        typer.Option(
            "--compare-axis",
            envvar="LAYERNORM_COMPARE_AXIS",
            help="Set batch normalization of all of X beside it: over the rows, not the features.",
        ),
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            envvar="LAYERNORM_PLOT",
            help="Draw the row before and after: .png or .svg.",
        ),
    ] = None,
    force: o.Force = False,
    format: o.Format = o.FormatName.table,
    features: Annotated[
        str | None,
        typer.Option(
            "--features",
            metavar="N|all",
            envvar="LAYERNORM_FEATURES",
            help="Features to print, the first and the last; 10, or all in csv and jsonl.",
        ),
    ] = None,
    quiet: o.Quiet = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Show the arithmetic of one row.

    Step by step, as a person would write it down: mean, var, root, division, gamma and beta. Then what
    eps does to the row, and what short dtypes do. Reads that row only, unless columns are compared.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import parse_eps
    from ..reports.explain import explain_csv, explain_json, explain_jsonl, explain_tables
    from ..reports.tables import draw_markdown
    from ..tasks.explain import ExplainRequest
    from ..tasks.explain import explain as run
    from ..tensorfiles.outputs import check_output, write_whole
    from ..tensorfiles.refs import without_secrets
    from .terminal import columns, print_table, progress_bar, warn, write

    lines = {o.FormatName.csv: explain_csv, o.FormatName.jsonl: explain_jsonl}.get(format)
    shown = o.n_or_all("--features", features, None if lines else 10)
    request = ExplainRequest(
        x=x,
        row=o.indices("--row", row),
        gamma=gamma,
        beta=beta,
        params=params,
        site=site,
        eps=None if eps is None else parse_eps(eps),
        kind=kind.value if kind else None,
        gamma_offset=gamma_offset,
        axis=axis,
        assume_dtype=float_dtype(assume_dtype) if assume_dtype else None,
        grad=None if grad is None else o.indices("--grad", grad),
        compare_axis=compare_axis,
    )
    if plot is not None:
        from ..reports.explain_plot import plot_row
        from ..reports.pictures import SUFFIXES, check_picture

        check_picture(plot)
        check_output(plot, SUFFIXES, force)
    with progress_bar(False if quiet else progress, without_secrets(x)) as on_progress:
        result = run(request, on_progress)
    if plot is not None:
        write_whole(plot, plot_row(result, plot))
    if quiet:
        return
    if lines is not None:
        write(lines(result, shown))
    elif format == o.FormatName.json:
        write(explain_json(result))
    else:
        for number, table in enumerate(explain_tables(result, shown, columns())):
            write("\n" * (number > 0))
            if format == o.FormatName.markdown:
                write(draw_markdown(table))
            else:
                print_table(table)
    for message in result.warnings:
        warn(message)
