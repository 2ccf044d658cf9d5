"""layernorm apply: normalize one tensor, block by block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..backends import choose_engine, load_prepare
from ..errors import InputError, UsageError
from ..norm.arrays import normalized_axis
from ..norm.dtypes import DTYPES, DType, numpy_dtype, output_dtype
from ..norm.forward import row_kernel
from ..norm.spec import Norm
from ..pipeline import Block, Job, Sink, merged, normalize
from ..results import ApplyResult, TableRow
from ..tensorfiles.outputs import STDOUT, check_output, open_output, open_text_output
from ..tensorfiles.outputs import SUFFIXES as TENSOR_SUFFIXES
from ..tensorfiles.reader import Tensor, open_tensor
from ..tensorfiles.refs import STDIN
from ..tensorfiles.rows import RowSource, split
from .row_table import EMPTY, all_rows, indices_of, row_summary, row_warnings, shown_rows, table_rows
from .stated_norm import StatedNorm, check_norm, metadata_of, state_norm

__all__ = ["ApplyRequest", "apply", "axis_of", "cores"]

STATS = ("mean", "var", "rstd", "mean_after", "var_after")


class ApplyRequest(NamedTuple):
    """What to apply to which refs; rows is how many to show, first and last ones, None for all."""

    x: str
    gamma: str | None = None
    beta: str | None = None
    params: str | None = None
    site: str | None = None
    residual: str | None = None
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
    sum_out: str | None = None
    save_stats: str | None = None
    rows: int | None = 10
    force: bool = False


def apply(
    request: ApplyRequest,
    on_row: Callable[[TableRow], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ApplyResult:
    """Normalize the tensor request.x, write what is asked for, and return what was seen.

    on_row takes the rows shown as they come, which then are not kept in the result's table: memory
    stays the same for any number of them. on_progress is told rows done and rows in all.

    Raises UsageError, InputError, OutputError, MissingEngine.
    """
    _check(request)
    with contextlib.ExitStack() as files:
        x = files.enter_context(open_tensor(request.x, request.assume_dtype))
        axis = axis_of(x, request.axis)
        rows, width = split(x.shape, axis)
        stated = state_norm(request, x.shape[axis:])
        norm = stated.norm
        backend, engine = choose_engine(request.backend, rows * width)
        prepare = load_prepare(backend, engine, norm.kind, x.dtype.name, request.device)
        dtype = request.dtype or output_dtype(x.dtype)
        leading = x.shape[:axis]
        shown = shown_rows(rows, request.rows)
        stats_out = files.enter_context(_stats_writer(request, stated, leading))
        job = Job(
            x=x.rows(axis),
            residual=_residual(request, x, axis, files),
            prepare=lambda: prepare(norm, width, request.device),
            prepare_stats=lambda: row_kernel(Norm(norm.kind, norm.eps), width),
            y_dtype=numpy_dtype(dtype),
            y=_sink(request.output, request, stated, x, dtype, files),
            total=_sink(request.sum_out, request, stated, x, dtype, files),
            shown=shown if request.save_stats is None else all_rows,
            processes=engine.processes,
        )
        summary = EMPTY
        table: list[TableRow] = []
        show = table.append if on_row is None else on_row
        for block in normalize(job, request.threads or cores()):
            summary = merged(summary, block.summary)
            stats_out(block)
            wanted = shown(block.start, block.start + block.rows) + block.start
            for row in table_rows(block, wanted, leading):
                show(row)
            if on_progress is not None:
                on_progress(block.start + block.rows, rows)
    return ApplyResult(
        input=x.ref,
        tensor=x.name,
        output=request.output,
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
        warnings=(*x.warnings, *row_warnings(summary, x.ref, norm, dtype, leading)),
    )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(request: ApplyRequest) -> None:
    """Find what cannot work before anything is read."""
    check_norm(request)
    refs = (request.x, request.gamma, request.beta, request.residual)
    if refs.count(STDIN) > 1:
        raise UsageError(STDIN, "standard input is given twice", "one tensor from it")
    if request.sum_out is not None and request.residual is None:
        raise UsageError("--sum-out", "there is no residual to add", "--residual REF too")
    outputs = [path for path in (request.output, request.sum_out, request.save_stats) if path]
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise UsageError(outputs[-1], "two outputs with this name", "a name for each")
    for path in (request.output, request.sum_out):
        if path is not None:
            check_output(path, TENSOR_SUFFIXES, request.force)
    if request.save_stats is not None:
        if request.save_stats == STDOUT:
            raise UsageError("--save-stats -", "statistics go to a file", "FILE.safetensors or FILE.csv")
        check_output(request.save_stats, (".safetensors", ".csv"), request.force)


def axis_of(x: Tensor, axis: int) -> int:
    """Return the first normalized axis of a tensor; Raises UsageError or InputError without one."""
    try:
        return normalized_axis(x.shape, axis)
    except UsageError as error:
        kind = UsageError if error.where else InputError
        where = f"{x.ref}: {error.where}" if error.where else x.ref
        raise kind(where, error.found, error.expected, error.hint) from None


def _residual(
    request: ApplyRequest, x: Tensor, axis: int, files: contextlib.ExitStack
) -> RowSource | None:
    if request.residual is None:
        return None
    residual = files.enter_context(open_tensor(request.residual, request.assume_dtype))
    if residual.shape != x.shape:
        raise UsageError(
            f"residual {residual.ref}", f"has shape {residual.shape}", f"x's shape {x.shape}"
        )
    return residual.rows(axis)


def _sink(
    path: str | None,
    request: ApplyRequest,
    stated: StatedNorm,
    x: Tensor,
    dtype: DType,
    files: contextlib.ExitStack,
) -> Sink | None:
    """Open an output for a tensor like x, named as in the input, or y."""
    if path is None:
        return None
    name = x.name or "y"
    tensors = {name: (dtype, x.shape)}
    output = files.enter_context(open_output(path, tensors, metadata_of(stated), request.force))
    return Sink(output, name, numpy_dtype(dtype))


@contextlib.contextmanager
def _stats_writer(
    request: ApplyRequest, stated: StatedNorm, leading: tuple[int, ...]
) -> Iterator[Callable[[Block], None]]:
    """A function that writes a block's statistics: csv lines, or float64 of x's leading shape."""
    path = request.save_stats
    if path is None:
        yield lambda block: None
    elif path.endswith(".csv"):
        with open_text_output(path) as write_text:
            write_text(",".join(("row", *STATS)) + "\n")

            def write_lines(block: Block) -> None:
                lines = []
                for place, numbers in zip(block.places.tolist(), block.columns.T.tolist(), strict=True):
                    index = ",".join(map(str, indices_of(place, leading)))
                    quoted = f'"{index}"' if "," in index else index
                    lines.append(",".join((quoted, *map(repr, numbers))) + "\n")
                write_text("".join(lines))

            yield write_lines
    else:
        tensors = dict.fromkeys(STATS, (DTYPES["float64"], leading))
        with open_output(path, tensors, metadata_of(stated), request.force) as output:

            def write_columns(block: Block) -> None:
                for name, column in zip(STATS, block.columns, strict=True):
                    output.write_rows(name, block.start, column)

            yield write_columns
