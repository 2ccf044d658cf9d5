"""layernorm grad: the backward pass of one tensor, block by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..backends import choose_engine, load_prepare_backward
from ..checkpoints.statistics import stats_of
from ..errors import UsageError
from ..norm.backward import BackwardKernel, Gradients, ParameterSums
from ..norm.differences import gradient_errors
from ..norm.dtypes import DTYPES, DType, numpy_dtype, output_dtype
from ..norm.forward import row_kernel
from ..norm.rounding import round_into, widen_into
from ..norm.spec import Norm
from ..pipeline import BackwardJob, Sink, differentiate, merged
from ..results import GradientCheck, GradientRefs, GradResult, TableRow
from ..tensorfiles.outputs import STDOUT, Output, check_output, open_output
from ..tensorfiles.reader import Tensor, open_tensor
from ..tensorfiles.refs import STDIN
from ..tensorfiles.rows import RowSource, split
from .apply import axis_of, cores
from .row_table import EMPTY, row_summary, row_warnings, shown_rows, table_rows
from .stated_norm import StatedNorm, check_norm, metadata_of, state_norm

__all__ = ["GradRequest", "grad"]

CHECKED_ELEMENTS = 1 << 18
CHECKED_PLACES = 8  # of the file, evenly spread


class GradRequest(NamedTuple):
    """What to differentiate; rows is how many to show, first and last ones, None for all.

    check is how many random directions to compare with finite differences, 0 for none.
    """

    x: str
    dy: str
    gamma: str | None = None
    beta: str | None = None
    params: str | None = None
    site: str | None = None
    eps: float | None = None
    kind: str | None = None
    gamma_offset: float | None = None
    axis: int = -1
    backend: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    dtype: DType | None = None
    assume_dtype: DType | None = None
    output: str | None = None
    check: int = 0
    rows: int | None = 10
    force: bool = False


def grad(
    request: GradRequest,
    on_row: Callable[[TableRow], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> GradResult:
    """Differentiate the norm of request.x, write what is asked for, and return what was seen.

    on_row takes the rows shown as they come, which then are not kept in the result's table.
    on_progress is told rows done and rows in all. dx has the dtype that the result of the norm has;
    dgamma and dbeta, which are sums over rows, have float32 at least.

    Raises UsageError, InputError, OutputError, MissingEngine.
    """
    _check(request)
    with contextlib.ExitStack() as files:
        x = files.enter_context(open_tensor(request.x, request.assume_dtype))
        dy = files.enter_context(open_tensor(request.dy, request.assume_dtype))
        if dy.shape != x.shape:
            raise UsageError(f"dy {dy.ref}", f"has shape {dy.shape}", f"x's shape {x.shape}")
        axis = axis_of(x, request.axis)
        rows, width = split(x.shape, axis)
        stated = state_norm(request, x.shape[axis:])
        norm = stated.norm
        backend, engine = choose_engine(request.backend, rows * width)
        prepare = load_prepare_backward(backend, engine, norm.kind, x.dtype.name, request.device)
        dtype = request.dtype or output_dtype(x.dtype)
        sum_dtype = request.dtype or max(dtype, DTYPES["float32"], key=lambda d: d.itemsize)
        leading = x.shape[:axis]
        shown = shown_rows(rows, request.rows)
        sources = x.rows(axis), dy.rows(axis)
        if request.check and any(source.sequential for source in sources):
            raise UsageError(
                "--check",
                "standard input can be read once only",
                "X and DY in files, to read rows again",
            )
        output = _open(request, x, (dtype, sum_dtype), stated, axis, files)
        job = BackwardJob(
            *sources,
            prepare=lambda: prepare(norm, width, request.device),
            prepare_stats=lambda: row_kernel(Norm(norm.kind, norm.eps), width),
            dx_dtype=numpy_dtype(dtype),
            dx=None if output is None else Sink(output, "dx", numpy_dtype(dtype)),
            shown=shown,
            processes=engine.processes,
        )
        summary = EMPTY
        table: list[TableRow] = []
        show = table.append if on_row is None else on_row
        dgamma, dbeta = ParameterSums.zero(width), ParameterSums.zero(width)
        for found in differentiate(job, request.threads or cores()):
            block = found.block
            summary = merged(summary, block.summary)
            dgamma.add(found.dgamma)
            dbeta.add(found.dbeta)
            wanted = shown(block.start, block.start + block.rows) + block.start
            for row in table_rows(block, wanted, leading):
                show(row)
            if on_progress is not None:
                on_progress(block.start + block.rows, rows)
        check = None
        if request.check:
            check = _compare(*sources, norm, prepare(norm, width, request.device), request.check)
        if output is not None:
            for name, total in (("dgamma", dgamma), ("dbeta", dbeta)):
                rounded = np.empty((1, width), numpy_dtype(sum_dtype))
                round_into(total.value()[None], rounded)
                output.write_rows(name, 0, rounded)
    return GradResult(
        input=x.ref,
        tensor=x.name,
        upstream=dy.ref,
        output=request.output,
        outputs=GradientRefs(
            *(request.output and f"{request.output}#{name}" for name in GradientRefs._fields)
        ),
        shape=x.shape,
        dtype=x.dtype.name,
        output_dtype=dtype.name,
        kind=norm.kind,
        axis=request.axis,
        eps=norm.eps,
        eps_source=stated.eps_source,
        gamma=stated.gamma,
        beta=stated.beta,
        gamma_offset=stated.gamma_offset,
        backend=backend,
        rows=rows,
        table=tuple(table),
        summary=row_summary(summary),
        dgamma_stats=stats_of(dgamma.value()),
        dbeta_stats=stats_of(dbeta.value()),
        check=check,
        warnings=(*x.warnings, *dy.warnings, *row_warnings(summary, x.ref, norm, dtype, leading)),
    )


def _check(request: GradRequest) -> None:
    """Find what cannot work before anything is read."""
    check_norm(request)
    if (request.x, request.dy, request.gamma, request.beta).count(STDIN) > 1:
        raise UsageError(STDIN, "standard input is given twice", "one tensor from it")
    if request.output == STDOUT:
        raise UsageError("-o -", "three tensors do not go to standard output", "-o FILE.safetensors")
    if request.output is not None:
        check_output(request.output, (".safetensors",), request.force)


def _open(
    request: GradRequest,
    x: Tensor,
    dtypes: tuple[DType, DType],
    stated: StatedNorm,
    axis: int,
    files: contextlib.ExitStack,
) -> Output | None:
    if request.output is None:
        return None
    features = x.shape[axis:]
    tensors = {
        "dx": (dtypes[0], x.shape),
        "dgamma": (dtypes[1], features),
        "dbeta": (dtypes[1], features),
    }
    return files.enter_context(open_output(request.output, tensors, metadata_of(stated), request.force))


def _compare(
    x: RowSource, dy: RowSource, norm: Norm, kernel: BackwardKernel, directions: int
) -> GradientCheck:
    """Compare the gradients of some rows with finite differences."""
    most = max(1, CHECKED_ELEMENTS // x.width)
    places = [(0, x.rows)]
    if x.rows > most:
        run = max(1, most // CHECKED_PLACES)
        starts = np.linspace(0, x.rows - run, min(CHECKED_PLACES, most), dtype=np.int64).tolist()
        places = [(start, start + run) for start in starts]
    wide = [np.empty((sum(stop - start for start, stop in places), x.width)) for _ in range(2)]
    for source, rows in zip((x, dy), wide, strict=True):
        blocks = [source.read_rows(*place) for place in places if place[1] > place[0]]
        if blocks:
            widen_into(np.concatenate(blocks), rows)
    finite = np.isfinite(wide[0]).all(axis=1) & np.isfinite(wide[1]).all(axis=1)
    if norm.eps == 0:
        finite &= row_kernel(norm, x.width)(wide[0], None).var > 0
    some_x, some_dy = (rows[finite] for rows in wide)
    native = x.storage if x.storage.kind in "fV" else np.dtype(np.float64)
    dx = np.empty(some_x.shape)
    found = kernel(some_x.astype(native), some_dy, dx)
    sums = [ParameterSums.zero(x.width) for _ in range(2)]
    for total, parts in zip(sums, (found.dgamma, found.dbeta), strict=True):
        total.add(parts)
    gradients = Gradients(dx, *(total.value() for total in sums))
    errors = gradient_errors(some_x, some_dy, norm, gradients, directions)
    return GradientCheck(directions, math.prod(some_x.shape[:1]), *errors)
