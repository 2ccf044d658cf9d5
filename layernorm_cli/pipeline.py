"""From source through kernel to sink, in blocks of rows: by one worker, threads or processes.

A block is read, computed and written by one worker. Where a source or a sink takes its rows in order
(a pipe), the calling thread does the reading and writing, and the workers only compute. Results come
back in the order of the rows, and no bit of them depends on blocks or workers.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import WorkerDied
from .norm.backward import BackwardKernel, segment_rows
from .norm.forward import Kernel, RowStats
from .norm.rounding import round_into, widen_into
from .tensorfiles.outputs import Output
from .tensorfiles.rows import RowSource
from .workers import Worker, work_through

__all__ = [
    "BackwardJob",
    "Block",
    "GradientBlock",
    "Job",
    "Sink",
    "Summary",
    "differentiate",
    "merged",
    "normalize",
]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Task = TypeVar("Task")
Result = TypeVar("Result")

BLOCK_ELEMENTS = 1 << 20
LESS_ELEMENTS = 1 << 18  # where there are few rows, smaller blocks keep all workers busy to the end
BLOCK_ROWS = 1 << 15  # statistics and text of short rows take more memory than the rows
FORK_ELEMENTS = 3 << 20  # less work than this is done before workers have started
MOST_AT_ONCE = 4


class Sink(NamedTuple):
    """Where a result goes: an output, the tensor's name in it, its dtype."""

    output: Output
    name: str
    dtype: np.dtype[np.generic]


class Job(NamedTuple):
    """What to normalize, how and whereto.

    prepare and prepare_stats make a kernel for one worker. With a residual, x + residual is
    normalized, and written to total. shown(start, stop) says which of these rows, counted from
    start, are to be reported one by one. processes: they serve this kernel better than threads.
    """

    x: RowSource
    residual: RowSource | None
    prepare: Callable[[], Kernel]
    prepare_stats: Callable[[], Kernel]
    y_dtype: np.dtype[np.generic]
    y: Sink | None
    total: Sink | None
    shown: Callable[[int, int], npt.NDArray[np.intp]]
    processes: bool


class BackwardJob(NamedTuple):
    """What to differentiate, how and whereto; the fields are as a Job's."""

    x: RowSource
    dy: RowSource
    prepare: Callable[[], BackwardKernel]
    prepare_stats: Callable[[], Kernel]
    dx_dtype: np.dtype[np.generic]
    dx: Sink | None
    shown: Callable[[int, int], npt.NDArray[np.intp]]
    processes: bool


class Summary(NamedTuple):
    """Rows in a few numbers; the ranges are over the rows without NaN and inf, and NaN without such."""

    mean_min: float
    mean_max: float
    var_min: float
    var_max: float
    constant_rows: int
    nonfinite_rows: int
    overflow: int
    first_constant: int | None
    first_nonfinite: int | None


def merged(one: Summary, other: Summary) -> Summary:
    """Return the summary of one's rows followed by other's."""
    return Summary(
        _smaller(one.mean_min, other.mean_min),
        -_smaller(-one.mean_max, -other.mean_max),
        _smaller(one.var_min, other.var_min),
        -_smaller(-one.var_max, -other.var_max),
        one.constant_rows + other.constant_rows,
        one.nonfinite_rows + other.nonfinite_rows,
        one.overflow + other.overflow,
        other.first_constant if one.first_constant is None else one.first_constant,
        other.first_nonfinite if one.first_nonfinite is None else one.first_nonfinite,
    )


def _smaller(a: float, b: float) -> float:
    return b if math.isnan(a) or b < a else a


class Block(NamedTuple):
    """The results of some rows from start on: their summary, and more of the k rows shown.

    places (k,) int counts from the first row of all; columns (5, k) float64 are mean, var, rstd, and
    mean and var after, measured on the rounded output.
    """

    start: int
    rows: int
    summary: Summary
    places: npt.NDArray[np.intp]
    columns: Float64


class GradientBlock(NamedTuple):
    """What some rows give: dgamma and dbeta (s, d) float64 of their s segments, in order."""

    block: Block
    dgamma: Float64
    dbeta: Float64


class _Span(NamedTuple):
    """Rows to do, and what each source has there, where the calling thread has read it."""

    start: int
    stop: int
    inputs: tuple[Array, ...] = ()


class _Plan(NamedTuple, Generic[Result]):
    """A job as the workers see it: rows of each source in, rows for each sink and a result out.

    prepare makes one worker's compute(start, inputs, outputs), which fills the outputs. size is how
    many rows it takes at a time.
    """

    sources: tuple[RowSource, ...]
    sinks: tuple[Sink, ...]
    prepare: Callable[[], Callable[[int, Sequence[Array], Sequence[Array]], Result]]
    size: int
    processes: bool


def normalize(job: Job, threads: int) -> Iterator[Block]:
    """Do the job with so many workers, and yield the results in the order of the rows.

    Raises what reading and writing raise, and WorkerDied where a worker process ends early.
    """
    sources = (job.x,) if job.residual is None else (job.x, job.residual)
    sinks = tuple(sink for sink in (job.y, job.total) if sink is not None)
    size = _block_rows(sources, threads)
    yield from _run(_Plan(sources, sinks, lambda: _normalizer(job), size, job.processes), threads)


def differentiate(job: BackwardJob, threads: int) -> Iterator[GradientBlock]:
    """Do the job as normalize does, and yield the gradients in the order of the rows; Raises as it."""
    sources = (job.x, job.dy)
    segment = segment_rows(job.x.width)
    size = -(-_block_rows(sources, threads) // segment) * segment  # no segment in two blocks
    sinks = () if job.dx is None else (job.dx,)
    processes = job.processes and segment > 1  # wide rows' sums are too much to send for each row
    yield from _run(_Plan(sources, sinks, lambda: _differentiator(job), size, processes), threads)


def _block_rows(sources: Sequence[RowSource], threads: int) -> int:
    x = sources[0]
    share = x.rows * x.width // (8 * threads)
    elements = min(max(share, LESS_ELEMENTS), BLOCK_ELEMENTS)
    rows = max(elements // x.width, *(source.least_rows for source in sources))
    return min(rows, BLOCK_ROWS, max(x.rows, 1))


def _run(plan: _Plan[Result], threads: int) -> Iterator[Result]:
    x = plan.sources[0]
    spans = [_Span(at, min(at + plan.size, x.rows)) for at in range(0, x.rows, plan.size)]
    threads = min(threads, len(spans))
    forkable = plan.processes and all(source.forkable for source in plan.sources)
    outputs = [sink.output for sink in plan.sinks]
    in_order = [source.sequential for source in plan.sources] + [out.sequential for out in outputs]
    if any(in_order):
        read = (_read(plan, span) for span in spans)
        for span, written, result in _map_threads(lambda: _computer(plan), read, threads):
            _write(plan, span, written)
            yield result
    elif threads > 1 and forkable and x.rows * x.width >= FORK_ELEMENTS:
        yield from _map_processes(lambda: _worker(plan), spans, threads)
    else:
        yield from _map_threads(lambda: _worker(plan), spans, threads)


def _worker(plan: _Plan[Result]) -> Callable[[_Span], Result]:
    """A worker that reads, computes and writes, always in the same memory: new memory is slow."""
    compute = plan.prepare()
    width = plan.sources[0].width
    inputs = [np.empty((plan.size, width), source.storage) for source in plan.sources]
    outputs = [np.empty((plan.size, width), sink.dtype) for sink in plan.sinks]

    def work(span: _Span) -> Result:
        count = span.stop - span.start
        written = [memory[:count] for memory in outputs]
        read = _read(plan, span, [memory[:count] for memory in inputs])
        result = compute(span.start, read.inputs, written)
        _write(plan, span, written)
        return result

    return work


def _computer(plan: _Plan[Result]) -> Callable[[_Span], tuple[_Span, list[Array], Result]]:
    """A worker that only computes, into new memory."""
    compute = plan.prepare()

    def work(span: _Span) -> tuple[_Span, list[Array], Result]:
        written = [np.empty(span.inputs[0].shape, sink.dtype) for sink in plan.sinks]
        return span, written, compute(span.start, span.inputs, written)

    return work


def _read(plan: _Plan[Result], span: _Span, memory: Sequence[Array | None] | None = None) -> _Span:
    places = memory or [None] * len(plan.sources)
    inputs = (
        source.read_rows(span.start, span.stop, place)
        for source, place in zip(plan.sources, places, strict=True)
    )
    return span._replace(inputs=tuple(inputs))


def _write(plan: _Plan[Result], span: _Span, outputs: Sequence[Array]) -> None:
    for sink, rows in zip(plan.sinks, outputs, strict=True):
        sink.output.write_rows(sink.name, span.start, rows)


def _normalizer(job: Job) -> Callable[[int, Sequence[Array], Sequence[Array]], Block]:
    kernel, stats_kernel = job.prepare(), job.prepare_stats()

    def compute(start: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> Block:
        x = inputs[0] if job.residual is None else _sum(*inputs)
        y = None if job.y is None else outputs[0]
        if job.total is not None:
            round_into(x.astype(np.float64), outputs[-1])
        stats = kernel(x, y)
        places = job.shown(start, start + len(x))
        shown = _rows_at(places, y, x.shape[1], job.y_dtype, lambda rows: kernel(x[places], rows))
        return _block(start, stats, places, shown, stats_kernel)

    return compute


def _differentiator(
    job: BackwardJob,
) -> Callable[[int, Sequence[Array], Sequence[Array]], GradientBlock]:
    kernel, stats_kernel = job.prepare(), job.prepare_stats()

    def compute(start: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> GradientBlock:
        x, dy = inputs
        dx = outputs[0] if outputs else None
        found = kernel(x, dy, dx)
        places = job.shown(start, start + len(x))
        shown = _rows_at(
            places, dx, x.shape[1], job.dx_dtype, lambda rows: kernel(x[places], dy[places], rows)
        )
        block = _block(start, found.stats, places, shown, stats_kernel)
        return GradientBlock(block, found.dgamma, found.dbeta)

    return compute


def _rows_at(
    places: npt.NDArray[np.intp],
    written: Array | None,
    width: int,
    dtype: np.dtype[np.generic],
    compute: Callable[[Array], object],
) -> Array:
    """The results at these places: computed again where nothing is written."""
    if written is not None:
        return written[places]
    rows = np.empty((len(places), width), dtype)
    if len(rows):
        compute(rows)
    return rows


def _block(
    start: int, stats: RowStats, places: npt.NDArray[np.intp], shown: Array, stats_kernel: Kernel
) -> Block:
    columns = np.empty((5, len(places)))
    if len(places):
        after = stats_kernel(shown, None)
        picked = (column[places] for column in (stats.mean, stats.var, stats.rstd))
        columns[:] = (*picked, after.mean, after.var)
    return Block(start, len(stats.mean), _summarize(stats, start), start + places, columns)


def _sum(x: Array, residual: Array) -> Float64:
    total, part = np.empty(x.shape), np.empty(x.shape)
    widen_into(x, total)
    widen_into(residual, part)
    with np.errstate(all="ignore"):
        total += part
    return total


def _summarize(stats: RowStats, start: int) -> Summary:
    finite = ~stats.nonfinite
    mean, var = (stats.mean[finite], stats.var[finite]) if not finite.all() else (stats.mean, stats.var)
    nan = math.nan
    return Summary(
        *((float(mean.min()), float(mean.max())) if len(mean) else (nan, nan)),
        *((float(var.min()), float(var.max())) if len(var) else (nan, nan)),
        int(stats.constant.sum()),
        int(stats.nonfinite.sum()),
        stats.overflow,
        start + int(stats.constant.argmax()) if stats.constant.any() else None,
        start + int(stats.nonfinite.argmax()) if stats.nonfinite.any() else None,
    )


def _map_threads(
    make_worker: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
    """Map tasks in order over threads, each with its own worker, a few tasks ahead at a time."""
    if workers <= 1:
        yield from map(make_worker(), tasks)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    idle = deque(make_worker() for _ in range(workers))

    def call(task: Task) -> Result:
        worker = idle.pop()
        try:
            return worker(task)
        finally:
            idle.append(worker)

    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                ahead.append(pool.submit(call, task))
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _map_processes(
    make_worker: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task], workers: int
) -> Iterator[Result]:
    """Map tasks in order over forked processes, a few at a time, so that they need not talk much.

    numpy's calls on a tile are so short that threads would wait for each other's hold of the
    interpreter.
    """
    size = max(1, min(len(tasks) // (128 * workers), MOST_AT_ONCE))
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]

    def make() -> Worker[list[Result]]:
        work = make_worker()

        def do(number: int) -> Iterator[list[Result]]:
            yield [work(task) for task in batches[number]]

        return do

    early: dict[int, list[Result]] = {}
    following = 0
    with contextlib.closing(work_through(make, len(batches), workers)) as done:
        for number, results in done:
            if isinstance(results, WorkerDied):
                raise results
            if not isinstance(results, int):
                early[number] = results
            while following in early:
                yield from early.pop(following)
                following += 1
