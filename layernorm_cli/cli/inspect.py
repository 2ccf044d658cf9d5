"""layernorm inspect CKPT"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o

__all__ = ["EXAMPLES", "inspect"]

EXAMPLES = (
    "layernorm inspect model.safetensors",
    "layernorm inspect model.safetensors --site 'ln_*' --check",
    "layernorm inspect model.safetensors --against model.safetensors --format markdown",
)


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="A .safetensors or .npz file, an index of shards, a directory, or an address of one.",
        ),
    ],
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="GLOB",
            envvar="LAYERNORM_SITE",
            help="Only sites whose names match, or end so: 'h.*.ln_1'.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="CKPT",
            envvar="LAYERNORM_AGAINST",
            help="Compare with another checkpoint, site by site.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            envvar="LAYERNORM_CHECK",
            help="Exit with 1 where a gamma is zero, or something not finite.",
        ),
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            envvar="LAYERNORM_PLOT",
            help="Draw gamma and beta over depth, and gamma as a map: .png or .svg.",
        ),
    ] = None,
    force: o.Force = False,
    format: o.Format = o.FormatName.table,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Find the norms of a checkpoint.

    Says of each what kind it is, its eps and where that is written, its place in the model, and what
    gamma and beta have learned. Reads the headers and the norms' own parameters, nothing else.
    """
    from ..reports.inspect import change_table, inspect_csv, inspect_json, inspect_jsonl, inspect_table
    from ..reports.tables import draw_markdown
    from ..tasks.inspect import FAILING, InspectRequest
    from ..tasks.inspect import inspect as run
    from ..tensorfiles.outputs import check_output, write_whole
    from .terminal import print_table, shows_blocks, warn, write

    if plot is not None:
        from ..reports.inspect_plot import plot_norms
        from ..reports.pictures import SUFFIXES, check_picture

        check_picture(plot)
        check_output(plot, SUFFIXES, force)
    result = run(InspectRequest(checkpoint, site, against, values=plot is not None))
    if plot is not None:
        write_whole(plot, plot_norms(result, plot))
    texts = {
        o.FormatName.json: inspect_json,
        o.FormatName.jsonl: inspect_jsonl,
        o.FormatName.csv: inspect_csv,
    }
    if not quiet:
        if format in texts:
            write(texts[format](result))
        else:
            tables = [inspect_table(result, shows_blocks())]
            if result.against is not None:
                tables.append(change_table(result.against))
            for table in tables:
                if format == o.FormatName.markdown:
                    write(draw_markdown(table))
                else:
                    print_table(table)
        for message in result.warnings:
            warn(message)
    if check and any(site.verdict in FAILING for site in result.sites):
        raise typer.Exit(1)
