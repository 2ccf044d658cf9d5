"""From source through kernel to sink, in blocks of rows; the only place with threads and processes.

A block is read, computed and written by one worker. Where a source or a sink takes its rows in order
(a pipe), the calling thread does the reading and writing, and the workers only compute. Results come
back in the order of the rows, and no bit of them depends on blocks or workers.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import WorkerDied
from .norm.forward import Kernel, RowStats
from .norm.rounding import round_into, widen_into
from .tensorfiles.outputs import Output
from .tensorfiles.rows import RowSource

__all__ = ["Block", "Job", "Sink", "Summary", "merged", "normalize"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
Task = TypeVar("Task")
Result = TypeVar("Result")

STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
BLOCK_ELEMENTS = 384 * 1024
BLOCK_ROWS = 1 << 15  # statistics and text of short rows take more memory than the rows
FORK_ELEMENTS = 8 * BLOCK_ELEMENTS  # less work than this is done before workers have started


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

    places (k,) int counts from the first row of all; stats (k,); mean_after and var_after (k,) are
    measured on the rounded output.
    """

    start: int
    rows: int
    summary: Summary
    places: npt.NDArray[np.intp]
    stats: RowStats
    mean_after: Float64
    var_after: Float64


class _Span(NamedTuple):
    """Rows to do; x and residual where the calling thread has read them."""

    start: int
    stop: int
    x: Array | None = None
    residual: Array | None = None


class _Compute(Protocol):
    def __call__(self, span: _Span, y: Array | None = None) -> _Done: ...


class _Done(NamedTuple):
    block: Block
    y: Array | None
    total: Array | None


def normalize(job: Job, threads: int) -> Iterator[Block]:
    """Do the job with so many workers, and yield the results in the order of the rows.

    Raises what reading and writing raise, and WorkerDied where a worker process ends early.
    """
    x = job.x
    size = _block_rows(job)
    spans = [_Span(at, min(at + size, x.rows)) for at in range(0, x.rows, size)]
    threads = min(threads, len(spans))
    outputs = [sink.output for sink in (job.y, job.total) if sink is not None]
    forkable = job.processes and all(source.forkable for source in _sources(job))
    in_order = [source.sequential for source in _sources(job)] + [out.sequential for out in outputs]
    if any(in_order):
        read = (_read(job, span) for span in spans)
        for done in _map_threads(lambda: _computer(job), read, threads):
            _write(job, done)
            yield done.block
    elif threads > 1 and forkable and x.rows * x.width >= FORK_ELEMENTS and _may_fork():
        yield from _map_processes(lambda: _worker(job), spans, threads)
    else:
        yield from _map_threads(lambda: _worker(job), spans, threads)


def _sources(job: Job) -> list[RowSource]:
    return [source for source in (job.x, job.residual) if source is not None]


def _block_rows(job: Job) -> int:
    rows = max(source.least_rows for source in _sources(job))
    return min(max(BLOCK_ELEMENTS // job.x.width, rows), BLOCK_ROWS, max(job.x.rows, 1))


def _worker(job: Job) -> Callable[[_Span], Block]:
    """A worker that reads, computes and writes, always in the same memory: new memory is slow."""
    compute = _computer(job)
    size = _block_rows(job)
    x = np.empty((size, job.x.width), job.x.storage)
    residual = None
    if job.residual is not None:
        residual = np.empty((size, job.x.width), job.residual.storage)
    y = None if job.y is None else np.empty((size, job.x.width), job.y_dtype)

    def work(span: _Span) -> Block:
        count = span.stop - span.start
        done = compute(_read(job, span, x, residual), None if y is None else y[:count])
        _write(job, done)
        return done.block

    return work


def _read(job: Job, span: _Span, x: Array | None = None, residual: Array | None = None) -> _Span:
    def read(source: RowSource, memory: Array | None) -> Array:
        count = span.stop - span.start
        return source.read_rows(span.start, span.stop, None if memory is None else memory[:count])

    return span._replace(
        x=read(job.x, x),
        residual=None if job.residual is None else read(job.residual, residual),
    )


def _write(job: Job, done: _Done) -> None:
    if job.y is not None and done.y is not None:
        job.y.output.write_rows(job.y.name, done.block.start, done.y)
    if job.total is not None and done.total is not None:
        job.total.output.write_rows(job.total.name, done.block.start, done.total)


def _computer(job: Job) -> _Compute:
    """A function that computes a span, into y where that is given, else into new memory."""
    kernel, stats_kernel = job.prepare(), job.prepare_stats()

    def compute(span: _Span, y: Array | None = None) -> _Done:
        assert span.x is not None
        x, total = span.x, None
        if span.residual is not None:
            x = _sum(x, span.residual)
            if job.total is not None:
                total = np.empty(x.shape, job.total.dtype)
                round_into(x.copy(), total)
        if y is None and job.y is not None:
            y = np.empty(x.shape, job.y_dtype)
        stats = kernel(x, y)
        places = job.shown(span.start, span.stop)
        mean_after = var_after = np.empty(0)
        if len(places):
            if y is not None:
                shown = y[places]
            else:
                shown = np.empty((len(places), x.shape[1]), job.y_dtype)
                kernel(x[places], shown)
            after = stats_kernel(shown, None)
            mean_after, var_after = after.mean, after.var
        picked = RowStats(
            stats.mean[places],
            stats.var[places],
            stats.rstd[places],
            stats.constant[places],
            stats.nonfinite[places],
        )
        block = Block(
            span.start,
            len(x),
            _summarize(stats, span.start),
            span.start + places,
            picked,
            mean_after,
            var_after,
        )
        return _Done(block, y, total)

    return compute


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


def _may_fork() -> bool:
    """Whether this process can fork safely: on Linux, and without other Python threads."""
    return sys.platform == "linux" and threading.active_count() == 1


def _map_processes(
    make_worker: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task], workers: int
) -> Iterator[Result]:
    """Map tasks in order over forked processes; worker w does tasks w, w + workers, ...

    numpy's calls on a tile are so short that threads would wait for each other's hold of the
    interpreter. The pipes between the processes carry this program's own pickles.
    """
    pids: list[int] = []
    pipes: list[BinaryIO] = []
    try:
        for index in range(workers):
            reading, writing = os.pipe()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # no worker may be unknown to us
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # BLAS threads, idle here
                pid = os.fork()
            if pid:
                pids.append(pid)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            else:
                for pipe in pipes:  # so that a worker's writing fails once the parent is gone
                    pipe.close()
                os.close(reading)
                _serve(make_worker, tasks[index::workers], writing)
            os.close(writing)
            pipes.append(os.fdopen(reading, "rb"))
        for index in range(len(tasks)):
            try:
                result = pickle.load(pipes[index % workers])
            except (EOFError, pickle.UnpicklingError):
                raise WorkerDied(
                    "", "a worker process died", None, "fewer --threads, if memory ran out"
                ) from None
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        for pipe in pipes:
            pipe.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(
    make_worker: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task], writing: int
) -> None:
    """The life of a worker process: do the tasks, send each result, and never return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        with os.fdopen(writing, "wb") as pipe:
            try:
                worker = make_worker()
                for task in tasks:
                    pickle.dump(worker(task), pipe, pickle.HIGHEST_PROTOCOL)
                    pipe.flush()
            except Exception as error:
                pickle.dump(error, pipe)
    finally:
        os._exit(0)
