"""layernorm verify X Y"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o

__all__ = ["EXAMPLES", "verify"]

EXAMPLES = (
    "layernorm verify x.npy normalized.npy --gamma gamma.npy --beta beta.npy --eps 1e-5",
    "layernorm verify x.npy normalized.npy --gamma gamma.npy --beta beta.npy --format json",
)


def verify(
    x: o.X,
    y: Annotated[
        str | None,
        typer.Argument(
            metavar="Y", help="What should be the norm of X; left out, all sites of --params."
        ),
    ] = None,
    gamma: o.Gamma = None,
    beta: o.Beta = None,
    params: o.Params = None,
    site: o.Site = None,
    input: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="PATTERN",
            envvar="LAYERNORM_INPUT_PATTERN",
            help="How X calls the input of a site, without Y.",
        ),
    ] = "{site}.input",
    output: Annotated[
        str,
        typer.Option(
            "--output",
            metavar="PATTERN",
            envvar="LAYERNORM_OUTPUT_PATTERN",
            help="How X calls the output of a site, without Y.",
        ),
    ] = "{site}.output",
    eps: o.Eps = None,
    kind: o.Kind = None,
    gamma_offset: o.GammaOffset = None,
    axis: o.Axis = -1,
    residual: o.Residual = None,
    rtol: o.Rtol = None,
    atol: o.Atol = None,
    assume_dtype: o.AssumeDtype = None,
    format: o.Format = o.FormatName.table,
    quiet: o.Quiet = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Check that Y is the norm of X.

    If it is not, known mistakes and variants are tried, and the one that explains Y is named: another
    eps, unbiased variance, a missing gamma, the wrong axis and others, and pairs of them. Exits with 0
    if it is, 1 if not.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import parse_eps
    from ..reports.tables import draw_markdown
    from ..reports.verify import verify_table, verify_text
    from ..tasks.verify import VerifyRequest, verify_sites
    from ..tasks.verify import verify as run
    from ..tensorfiles.refs import without_secrets
    from .terminal import print_table, progress_bar, warn, write

    request = VerifyRequest(
        x=x,
        y=y,
        gamma=gamma,
        beta=beta,
        params=params,
        site=site,
        residual=residual,
        eps=None if eps is None else parse_eps(eps),
        kind=kind.value if kind else None,
        gamma_offset=gamma_offset,
        axis=axis,
        rtol=rtol,
        atol=atol,
        assume_dtype=float_dtype(assume_dtype) if assume_dtype else None,
        input=input,
        output=output,
    )
    with progress_bar(False if quiet else progress, without_secrets(x)) as on_progress:
        result = run(request, on_progress) if y is not None else verify_sites(request, on_progress)
    if not quiet:
        if format == o.FormatName.table:
            print_table(verify_table(result))
        elif format == o.FormatName.markdown:
            write(draw_markdown(verify_table(result)))
        else:
            write(verify_text(result, format.value))
        for message in result.warnings:
            warn(message)
    if not result.match:
        raise typer.Exit(1)
