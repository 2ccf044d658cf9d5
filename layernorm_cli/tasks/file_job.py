"""One file of a batch, from input to output: the same wherever it is done."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..backends import choose_engine, load_prepare
from ..errors import InputError, LayernormError
from ..norm.dtypes import DType, numpy_dtype, output_dtype
from ..norm.forward import Kernel, RowStats
from ..pipeline import Job, Sink, Summary, merged, normalize
from ..results import FileRecord, FileResult
from ..tensorfiles.bytes_at import as_file, open_source
from ..tensorfiles.exact_io import reason
from ..tensorfiles.journal import Entry, Stamp, label_for, stamp_of, write_entry
from ..tensorfiles.outputs import Output, open_output
from ..tensorfiles.reader import Tensor, TensorFile, open_tensors
from ..tensorfiles.refs import Ref, is_address, without_secrets
from ..tensorfiles.rows import split
from .apply import axis_of
from .row_table import EMPTY, row_warnings
from .stated_norm import ReadNorm, StatedNorm, metadata_of, norm_over

__all__ = [
    "BatchSettings",
    "Done",
    "FileJob",
    "Work",
    "entry_for",
    "file_worker",
    "metadata_for",
    "normalizer",
    "result_of",
    "seen_of",
    "text_of",
    "work_of",
    "write_whole_entry",
]

PROGRESS_SECONDS = 0.2
LARGEST_BLOCK = 16 << 20
SMALL = 128 * 1024  # elements that are read, computed and written here, without pipeline's workers
NO_ROWS = np.empty(0, np.intp)


class BatchSettings(NamedTuple):
    """What all files of a batch have in common; parameters is the journal's digest of it.

    checksum: know inputs again by their content, not by size and time.
    """

    norm: ReadNorm
    axis: int
    dtype: DType | None
    assume_dtype: DType | None
    backend: str
    device: str
    threads: int
    keep_others: bool
    parameters: str
    checksum: bool


class FileJob(NamedTuple):
    """A file (path and name of a ref; size in bytes), and its output: an entry of a directory.

    real is the input's own path, whatever links lead there. seen is what the output, which is there,
    was made from, where that is known by its content.
    """

    path: str
    name: str | None
    real: str
    size: int
    output_dir: str
    entry: str
    seen: Entry | None = None

    @property
    def output(self) -> str:
        """The output's path."""
        return os.path.join(self.output_dir, self.entry)

    @property
    def input(self) -> str:
        """The input's ref, as messages and the manifest show it."""
        path = without_secrets(self.path)
        return path if self.name is None else f"{path}#{self.name}"


def text_of(error: BaseException) -> str:
    """Return an error as one line, for a manifest."""
    if isinstance(error, LayernormError):
        return "; ".join(line.strip() for line in str(error).splitlines())
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, MemoryError):
        return "not enough memory"
    return f"{type(error).__name__}: {error}"


def file_worker(
    settings: BatchSettings, journal: int
) -> Callable[[FileJob], Iterator[int | FileResult]]:
    """Return a function that does one file: it yields bytes done now and then, and its result last.

    journal is open, and gets an entry for each output. Norms and kernels are made once for all files
    of a shape.
    """

    _keep_freed_memory()

    @lru_cache(2)
    def stated(shape: tuple[int, ...]) -> StatedNorm:
        return norm_over(settings.norm, shape)

    normalized = normalizer(settings, stated)

    def do(job: FileJob) -> Iterator[int | Done]:
        read, checksum = seen_of(settings, job)
        if job.seen is not None and checksum == job.seen.checksum:
            yield Done("skipped", job.seen.rows, job.seen.bytes)
            return
        with open_tensors(Ref(job.input, job.path, job.name), settings.assume_dtype) as file:
            works = [work_of(settings, x, stated) for x in file.tensors]
            rows = sum(work.rows for work in works)
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in file.tensors)

            entry = entry_for(settings, job, read, checksum, rows, size)

            def write_down(fd: int, temporary: str) -> None:
                write_whole_entry(journal, entry, fd, temporary)

            warnings: list[str] = []
            done = 0
            with open_output(
                job.output,
                {work.name: (work.dtype, work.x.shape) for work in works},
                metadata_for(settings, file, works),
                force=True,  # what may not be replaced was found before
                copies=file.others if settings.keep_others else None,
                on_whole=write_down,
                label=label_for(entry) if is_address(job.output) else None,
            ) as output:
                for x, axis, norm, dtype, name, _ in works:
                    row_bytes = math.prod(x.shape[axis:]) * x.dtype.itemsize
                    summary = EMPTY
                    for count, seen in normalized(x, axis, Sink(output, name, numpy_dtype(dtype))):
                        summary = merged(summary, seen)
                        done += count * row_bytes
                        yield done
                    warnings += x.warnings
                    warnings += row_warnings(summary, x.ref, norm.norm, dtype, x.shape[:axis])
                if settings.keep_others:
                    _copy_others(file, output)
        yield Done("done", rows, size, tuple(warnings))

    def work(job: FileJob) -> Iterator[int | FileResult]:
        start = told = time.perf_counter()
        try:
            for said in do(job):
                now = time.perf_counter()
                if isinstance(said, Done):
                    yield result_of(job, said, now - start)
                elif now > told + PROGRESS_SECONDS:
                    told = now
                    yield said
        except Exception as error:  # whatever it is, the other files go on
            yield result_of(job, Done("failed", 0, 0), time.perf_counter() - start, text_of(error))

    return work


def normalizer(
    settings: BatchSettings, stated: Callable[[tuple[int, ...]], StatedNorm]
) -> Callable[[Tensor, int, Sink], Iterator[tuple[int, Summary]]]:
    """Return a function that normalizes a tensor, with kernels and memory that are made once."""
    backend, engine = choose_engine(settings.backend, 0)

    def make_kernel(shape: tuple[int, ...], dtype: str) -> Kernel:
        norm = stated(shape).norm
        prepare = load_prepare(backend, engine, norm.kind, dtype, settings.device)
        return prepare(norm, math.prod(shape), settings.device)

    own_kernel = lru_cache(2)(make_kernel)
    memory = lru_cache(2)(_memory)

    def normalized(x: Tensor, axis: int, sink: Sink) -> Iterator[tuple[int, Summary]]:
        """Normalize a tensor; yield how many rows are done, and what was seen of them."""
        shape, dtype, source = x.shape[axis:], x.dtype.name, x.rows(axis)
        size = source.rows, source.width
        if 0 < source.rows * source.width <= SMALL and not sink.output.sequential:
            rows, y = memory(size, source.storage, sink.dtype)
            stats = own_kernel(shape, dtype)(source.read_rows(0, source.rows, rows), y)
            sink.output.write_rows(sink.name, 0, y)
            yield source.rows, _summary(stats)
            return
        kernel = own_kernel if settings.threads == 1 else make_kernel
        job = Job(
            x=source,
            residual=None,
            prepare=lambda: kernel(shape, dtype),
            prepare_stats=lambda: kernel(shape, dtype),  # not used: no row is shown
            y_dtype=sink.dtype,
            y=sink,
            total=None,
            shown=_no_rows,
            processes=engine.processes,
        )
        for block in normalize(job, settings.threads):
            yield block.rows, block.summary

    return normalized


def _keep_freed_memory() -> None:
    """Let malloc keep the memory of one file for the next, whose pages would cost as much as its data.

    glibc gives blocks back to the system that are larger than any that it has given back before.
    """
    np.empty(LARGEST_BLOCK, np.uint8)


def _memory(
    size: tuple[int, int], x: np.dtype[np.generic], y: np.dtype[np.generic]
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    return np.empty(size, x), np.empty(size, y)


def _summary(stats: RowStats) -> Summary:
    """What is to be warned of in some rows; the ranges, which pipeline adds, nobody asks for here."""
    constant, nonfinite = np.count_nonzero(stats.constant), np.count_nonzero(stats.nonfinite)
    return EMPTY._replace(
        constant_rows=int(constant),
        nonfinite_rows=int(nonfinite),
        overflow=stats.overflow,
        first_constant=int(stats.constant.argmax()) if constant else None,
        first_nonfinite=int(stats.nonfinite.argmax()) if nonfinite else None,
    )


class Done(NamedTuple):
    """How a file ended, what was normalized of it, and what is to be warned of."""

    status: str
    rows: int
    bytes: int
    warnings: tuple[str, ...] = ()


class Work(NamedTuple):
    """A tensor of a file, its axis and norm, the output's dtype and name."""

    x: Tensor
    axis: int
    stated: StatedNorm
    dtype: DType
    name: str
    rows: int


def work_of(settings: BatchSettings, x: Tensor, stated: Callable[[tuple[int, ...]], StatedNorm]) -> Work:
    """Return what is to be done with a tensor; Raises UsageError where it does not fit the norm."""
    axis = axis_of(x, settings.axis)
    dtype = settings.dtype or output_dtype(x.dtype)
    rows, _ = split(x.shape, axis)
    return Work(x, axis, stated(x.shape[axis:]), dtype, x.name or "y", rows)


def metadata_for(settings: BatchSettings, file: TensorFile, works: list[Work]) -> dict[str, str]:
    """Return what the output says of its norm, which is one for all tensors; and what the file said."""
    kept = file.metadata or {} if settings.keep_others else {}
    return {**kept, **metadata_of(works[0].stated)}


def _copy_others(file: TensorFile, output: Output) -> None:
    if file.others is None:
        raise InputError(
            file.tensors[0].ref, "its other tensors cannot be copied", "a .safetensors file"
        )
    for name, entry in file.others.items():
        at = 0
        for part in file.bytes_of(entry):
            output.write_rows(name, at, np.frombuffer(part, np.uint8))
            at += len(part)


def _no_rows(start: int, stop: int) -> npt.NDArray[np.intp]:
    return NO_ROWS


def result_of(job: FileJob, done: Done, seconds: float, error: str | None = None) -> FileResult:
    """Return how a job ended as its record, with what is to be warned of."""
    status, rows, size, warnings = done
    return FileResult(FileRecord(job.input, job.output, status, rows, size, seconds, error), warnings)


def entry_for(
    settings: BatchSettings,
    job: FileJob,
    read: Stamp | None,
    checksum: str | None,
    rows: int,
    size: int,
) -> Entry:
    """Return what a journal is to say of a job's output, less its stamp and temporary name."""
    return Entry(
        output=job.entry,
        temporary="",
        made=Stamp(0, 0),
        input=job.real,
        name=job.name,
        read=read,
        checksum=checksum,
        parameters=settings.parameters,
        rows=rows,
        bytes=size,
    )


def write_whole_entry(journal: int, entry: Entry, fd: int, temporary: str) -> None:
    """Write the entry of an output that is whole, and open, under its temporary name."""
    status = os.fstat(fd)
    made = Stamp(status.st_size, status.st_mtime_ns)
    write_entry(journal, entry._replace(temporary=os.path.basename(temporary), made=made))


def seen_of(settings: BatchSettings, job: FileJob) -> tuple[Stamp | None, str | None]:
    """Return what the journal is to say of an input: its stamp before it is read, its checksum."""
    try:
        stamp = stamp_of(job.path)
        if not settings.checksum:
            return stamp, None
        with open_source(job.path) as source, as_file(source) as file:
            return stamp, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(job.input, reason(error)) from None
