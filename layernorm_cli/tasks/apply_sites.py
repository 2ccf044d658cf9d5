"""layernorm apply --all-sites: every norm of a checkpoint, each on its own tensor of a file."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..backends import choose_engine, load_prepare
from ..checkpoints.sites import Site
from ..checkpoints.survey import read_parameters, survey
from ..errors import InputError, UsageError
from ..norm.dtypes import DType, numpy_dtype, output_dtype
from ..norm.forward import row_kernel
from ..norm.spec import Norm
from ..pipeline import Job, Sink, Summary, merged, normalize
from ..results import ApplySitesResult, SiteRows
from ..tensorfiles.outputs import check_output, open_output
from ..tensorfiles.reader import Tensor, open_tensor
from ..tensorfiles.refs import Ref, without_secrets
from ..tensorfiles.rows import split
from ..tensorfiles.sharded import open_checkpoint
from .apply import ApplyRequest, axis_of, cores
from .row_table import EMPTY, all_rows, row_warnings
from .site_pairs import PLACE, check_pattern, pair_sites
from .stated_norm import StatedNorm, check_norm, metadata_of, norm_of_site

__all__ = ["apply_sites"]


class _Work(NamedTuple):
    """One site and its open tensor, the norm, and the output's name and dtype."""

    site: Site
    x: Tensor
    axis: int
    stated: StatedNorm
    name: str
    dtype: DType


def apply_sites(
    request: ApplyRequest, match: str, on_progress: Callable[[int, int], None] | None = None
) -> ApplySitesResult:
    """Normalize each tensor of request.x that match names for a site of request.params, with that site.

    All outputs go into one file. on_progress is told rows done and rows in all.

    Raises UsageError, InputError, OutputError, MissingEngine.
    """
    params = _check(request, match)
    found = survey(params)
    file = open_checkpoint(request.x)
    pairs, unmatched = pair_sites(found.sites, file.tensors, match)
    if not pairs:
        raise InputError(
            without_secrets(request.x),
            f"no tensor that {match!r} names for a site of {without_secrets(params)}",
            None,
            f"--match with one of its names, such as {next(iter(file.tensors), 'none at all')!r}",
        )
    parameters = dict(read_parameters(found, [site for site, _ in pairs]))
    with contextlib.ExitStack() as files:
        works = []
        for site, tensor in pairs:
            ref = Ref(f"{without_secrets(request.x)}#{tensor}", file.tensors[tensor].file, tensor)
            x = files.enter_context(open_tensor(ref, request.assume_dtype))
            axis = axis_of(x, request.axis)
            stated = norm_of_site(request, site, parameters[site], x.shape[axis:])
            dtype = request.dtype or output_dtype(x.dtype)
            works.append(_Work(site, x, axis, stated, _output_name(tensor, match), dtype))
        total = sum(math.prod(work.x.shape) for work in works)
        backend, _ = choose_engine(request.backend, total)
        sinks = files.enter_context(_sinks(request, works))
        done, rows_in_all = 0, sum(split(work.x.shape, work.axis)[0] for work in works)
        lines, warnings = [], []
        for work in works:
            line, summary = _run(request, work, sinks.get(work.name))
            lines.append(line)
            done += line.rows
            if on_progress is not None:
                on_progress(done, rows_in_all)
            leading = work.x.shape[: work.axis]
            warnings += [
                *work.x.warnings,
                *row_warnings(summary, work.x.ref, work.stated.norm, work.dtype, leading),
            ]
    if unmatched:
        names = ", ".join(site.site for site in unmatched)
        warnings.append(f"{without_secrets(request.x)}: no tensor for {len(unmatched)} sites: {names}")
    return ApplySitesResult(
        input=without_secrets(request.x),
        params=without_secrets(params),
        match=match,
        output=request.output,
        output_tensors=tuple(work.name for work in works) if request.output else (),
        backend=backend,
        sites=tuple(lines),
        warnings=(*found.warnings, *warnings),
    )


def _check(request: ApplyRequest, match: str) -> str:
    check_norm(request)
    if request.params is None:
        raise UsageError("--all-sites", "there is no checkpoint that they are in", "--params CKPT too")
    for option, value in (
        ("--site", request.site),
        ("--residual", request.residual),
        ("--sum-out", request.sum_out),
        ("--save-stats", request.save_stats),
    ):
        if value is not None:
            raise UsageError(option, "does not go with --all-sites", "one of the two")
    check_pattern("--match", match)
    if request.output is not None:
        check_output(request.output, (".safetensors",), request.force)
    return request.params


def _output_name(tensor: str, match: str) -> str:
    """The name of an output: its input's, or where that ends in input, with output in its place."""
    after = match.split(PLACE)[1]
    if not re.search("input", after):
        return tensor
    return tensor[: len(tensor) - len(after)] + after.replace("input", "output")


@contextlib.contextmanager
def _sinks(request: ApplyRequest, works: list[_Work]) -> Iterator[dict[str, Sink]]:
    if request.output is None:
        yield {}
        return
    tensors = {work.name: (work.dtype, work.x.shape) for work in works}
    kinds = {work.stated.norm.kind for work in works}
    metadata = metadata_of(works[0].stated) if len(kinds) == 1 else {}
    with open_output(request.output, tensors, metadata, request.force) as output:
        yield {work.name: Sink(output, work.name, numpy_dtype(work.dtype)) for work in works}


def _run(request: ApplyRequest, work: _Work, sink: Sink | None) -> tuple[SiteRows, Summary]:
    rows, width = split(work.x.shape, work.axis)
    norm = work.stated.norm
    name, engine = choose_engine(request.backend, rows * width)
    prepare = load_prepare(name, engine, norm.kind, work.x.dtype.name, request.device)
    job = Job(
        x=work.x.rows(work.axis),
        residual=None,
        prepare=lambda: prepare(norm, width, request.device),
        prepare_stats=lambda: row_kernel(Norm(norm.kind, norm.eps), width),
        y_dtype=numpy_dtype(work.dtype),
        y=sink,
        total=None,
        shown=all_rows,
        processes=engine.processes,
    )
    summary = EMPTY
    sums, count = np.zeros(4), 0
    for block in normalize(job, request.threads or cores()):
        summary = merged(summary, block.summary)
        columns = block.columns[[0, 1, 3, 4]]
        finite = columns[:, np.isfinite(columns).all(axis=0)]
        sums += finite.sum(axis=1)
        count += finite.shape[1]
    averages = (sums / count).tolist() if count else [math.nan] * 4
    site, stated = work.site.site, work.stated
    line = SiteRows(site, work.x.name or "", rows, norm.kind, norm.eps, stated.eps_source, *averages)
    return line, summary
