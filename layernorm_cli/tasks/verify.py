"""layernorm verify: is Y the layer norm of X, and if not, what is it?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

from ..checkpoints.sites import Site
from ..errors import InputError, UsageError
from ..norm.closeness import closeness
from ..norm.dtypes import DType
from ..norm.row_pairs import Array, RowPairs
from ..norm.verification import Verdict, check
from ..results import SiteVerdict, VerifyResult, VerifySitesResult
from ..tensorfiles.exact_io import open_spool, write_next
from ..tensorfiles.reader import Tensor, open_tensor
from ..tensorfiles.refs import STDIN, Ref, without_secrets
from ..tensorfiles.rows import FileRows, RowSource, bytes_of
from .apply import axis_of
from .site_pairs import check_pattern, pair_sites
from .stated_norm import StatedNorm, check_norm, norm_of_site, state_norm

__all__ = ["VerifyRequest", "verify", "verify_sites"]

Progress = Callable[[int, int], None]
SPOOL_ELEMENTS = 1 << 18


class VerifyRequest(NamedTuple):
    """Which refs to compare, as the norm of what; y is None where every site of params is meant.

    Then x is the file of all tensors, and input and output are the patterns of their names.
    """

    x: str
    y: str | None = None
    gamma: str | None = None
    beta: str | None = None
    params: str | None = None
    site: str | None = None
    residual: str | None = None
    eps: float | None = None
    kind: str | None = None
    gamma_offset: float | None = None
    axis: int = -1
    rtol: float | None = None
    atol: float | None = None
    assume_dtype: DType | None = None
    input: str = "{site}.input"
    output: str = "{site}.output"


def verify(request: VerifyRequest, on_progress: Progress | None = None) -> VerifyResult:
    """Say whether request.y is the norm of request.x; on_progress is told rows done and in all.

    What comes through a pipe is kept in a file without a name, since it may be read again.

    Raises UsageError, InputError.
    """
    check_norm(request)
    if request.y is None:
        raise UsageError("Y", "there is no tensor to verify", "X and Y, or --params CKPT and X")
    refs = (request.x, request.y, request.gamma, request.beta, request.residual)
    if refs.count(STDIN) > 1:
        raise UsageError(STDIN, "standard input is given twice", "one tensor from it")
    with contextlib.ExitStack() as files:
        x = files.enter_context(open_tensor(request.x, request.assume_dtype))
        y = files.enter_context(open_tensor(request.y, request.assume_dtype))
        residual = None
        if request.residual is not None:
            residual = files.enter_context(open_tensor(request.residual, request.assume_dtype))
        axis = axis_of(x, request.axis)
        stated = state_norm(request, x.shape[axis:])
        verdict = _verdict(request, stated, x, y, residual, axis, files, on_progress)
        tensors = [tensor for tensor in (x, y, residual) if tensor is not None]
        return VerifyResult(
            input=x.ref,
            tensor=x.name,
            output=y.ref,
            output_tensor=y.name,
            residual=None if residual is None else residual.ref,
            axis=request.axis,
            eps_source=stated.eps_source,
            gamma=stated.gamma,
            beta=stated.beta,
            gamma_offset=stated.gamma_offset,
            input_dtype=x.dtype.name,
            verdict=verdict,
            warnings=tuple(warning for tensor in tensors for warning in tensor.warnings),
        )


def verify_sites(request: VerifyRequest, on_progress: Progress | None = None) -> VerifySitesResult:
    """Say of every site of request.params whether its output in the file request.x is right.

    Raises UsageError, InputError.
    """
    from ..checkpoints.survey import read_parameters, survey
    from ..tensorfiles.sharded import open_checkpoint

    params = _check_sites(request)
    found = survey(params)
    file = open_checkpoint(request.x)
    where = without_secrets(request.x)
    inputs = dict(pair_sites(found.sites, file.tensors, request.input)[0])
    outputs = dict(pair_sites(found.sites, file.tensors, request.output)[0])
    sites = [site for site in inputs if site in outputs]
    if not sites:
        raise InputError(
            where,
            f"no site of {without_secrets(params)} with both {request.input!r} and {request.output!r}",
            None,
            f"--input and --output with its names, such as {next(iter(file.tensors), 'none at all')!r}",
        )
    parameters = dict(read_parameters(found, sites))
    lines: list[SiteVerdict] = []
    warnings = list(found.warnings)
    for site in sites:
        with contextlib.ExitStack() as files:

            def opened(name: str, files: contextlib.ExitStack = files) -> Tensor:
                ref = Ref(f"{where}#{name}", file.tensors[name].file, name)
                return files.enter_context(open_tensor(ref, request.assume_dtype))

            x, y = opened(inputs[site]), opened(outputs[site])
            axis = axis_of(x, request.axis)
            stated = norm_of_site(request, site, parameters[site], x.shape[axis:])
            verdict = _verdict(request, stated, x, y, None, axis, files, None)
            line = SiteVerdict(site.site, inputs[site], outputs[site], stated.eps_source, verdict)
            lines.append(line)
            warnings += [*x.warnings, *y.warnings]
        if on_progress is not None:
            done = sum(line.verdict.rows for line in lines)
            on_progress(done, done * len(sites) // len(lines))  # sites have about as many rows each
    warnings += _missing(where, found.sites, sites)
    return VerifySitesResult(
        match=all(line.verdict.match for line in lines),
        input=where,
        params=without_secrets(params),
        sites=tuple(lines),
        warnings=tuple(warnings),
    )


def _check_sites(request: VerifyRequest) -> str:
    check_norm(request)
    if request.params is None:
        raise UsageError("Y", "there is no tensor to verify", "X and Y, or --params CKPT and X")
    for option, value in (("--site", request.site), ("--residual", request.residual)):
        if value is not None:
            raise UsageError(option, "does not go with all sites", f"Y too, or no {option}")
    check_pattern("--input", request.input)
    check_pattern("--output", request.output)
    return request.params


def _missing(where: str, every: tuple[Site, ...], sites: list[Site]) -> list[str]:
    names = [site.site for site in every if site not in sites]
    count = f"{len(names)} site{'s' * (len(names) != 1)}"
    return [f"{where}: no input or no output of {count}: {', '.join(names)}"] if names else []


def _verdict(
    request: VerifyRequest,
    stated: StatedNorm,
    x: Tensor,
    y: Tensor,
    residual: Tensor | None,
    axis: int,
    files: contextlib.ExitStack,
    on_progress: Progress | None,
) -> Verdict:
    for name, tensor in (("Y", y), ("residual", residual)):
        if tensor is not None and tensor.shape != x.shape:
            expected = f"shape {x.shape}, as {x.ref} has"
            raise UsageError(f"{name} {tensor.ref}", f"has shape {tensor.shape}", expected)
    close = closeness(x.dtype, y.dtype, math.prod(x.shape[axis:]), request.rtol, request.atol)
    x_rows, y_rows = (_again(tensor.rows(axis), files) for tensor in (x, y))
    residual_rows = None if residual is None else _again(residual.rows(axis), files)

    def read(start: int, stop: int) -> tuple[Array, Array | None, Array]:
        more = None if residual_rows is None else residual_rows.read_rows(start, stop)
        return x_rows.read_rows(start, stop), more, y_rows.read_rows(start, stop)

    sources = [rows for rows in (x_rows, y_rows, residual_rows) if rows is not None]
    run = max(rows.least_rows for rows in sources)
    pairs = RowPairs(x.shape, axis, x.dtype, y.dtype, residual is not None, read, run)
    return check(pairs, stated.norm, stated.gamma_offset, close, on_progress)


def _again(rows: RowSource, files: contextlib.ExitStack) -> RowSource:
    """The same rows from where they can be read again: those of a pipe are copied to a spool."""
    if not rows.sequential:
        return rows
    spool = open_spool(files)
    size = max(1, SPOOL_ELEMENTS // rows.width)
    for start in range(0, rows.rows, size):
        block = rows.read_rows(start, min(start + size, rows.rows))
        write_next(spool, bytes_of(block))
    return FileRows(spool, 0, rows.storage, rows.rows, rows.width, STDIN)
