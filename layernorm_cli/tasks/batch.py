"""layernorm batch: normalize many files, and go on where a run has ended."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from typing import NamedTuple

from .. import __version__
from ..backends import choose_engine
from ..errors import OutputError, UsageError, WorkerDied
from ..norm.dtypes import DType
from ..results import BatchResult, BatchSummary, FileRecord, FileResult, StatusTotal
from ..tensorfiles.exact_io import reason
from ..tensorfiles.journal import open_journal
from ..tensorfiles.refs import is_address
from ..workers import work_through
from .apply import cores
from .batch_inputs import Selection, find_inputs
from .batch_plan import Plan, check_name, make_plan, parse_shard, remove_temporaries, settle
from .file_job import BatchSettings, FileJob, file_worker, text_of
from .stated_norm import ReadNorm, check_norm, norm_over, read_norm

__all__ = ["BatchRequest", "batch"]

STATUSES = ("done", "skipped", "failed")
ELEMENT = 4  # bytes of an element, most likely
MOST_KEPT = 1000  # failures and warnings that are kept for the report at the end


class BatchRequest(NamedTuple):
    """Which files to normalize, how and whereto; and who does it: jobs and threads in each."""

    inputs: tuple[str, ...]
    output_dir: str
    files_from: str | None = None
    separator: bytes = b"\n"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    base: str | None = None
    name: str = "{stem}{suffix}"
    keep_others: bool = False
    gamma: str | None = None
    beta: str | None = None
    params: str | None = None
    site: str | None = None
    eps: float | None = None
    kind: str | None = None
    gamma_offset: float | None = None
    axis: int = -1
    dtype: DType | None = None
    assume_dtype: DType | None = None
    force: bool = False
    resume: bool = False
    checksum: bool = False
    shard: str | None = None
    fail_fast: bool = False
    engine: str = "local"
    scheduler: str | None = None
    backend: str = "auto"
    device: str = "cpu"
    jobs: int | None = None
    threads: int | None = None


class Progress(NamedTuple):
    """How far a batch is: files and bytes of input done, and those in all."""

    files: int
    bytes: int
    all_files: int
    all_bytes: int


def batch(
    request: BatchRequest,
    on_start: Callable[[], None] | None = None,
    on_record: Callable[[FileRecord], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> BatchResult:
    """Normalize the files of a batch; a file that cannot be is a record that says so, and no more.

    Whatever stands in the way of all files is found before anything is written; then on_start is
    called. on_record takes the record of each file when it is done.

    Raises UsageError, InputError, OutputError, MissingEngine, WorkerDied.
    """
    start = time.perf_counter()
    plan, settings, jobs = _prepare(request)
    _make_folders(plan.jobs, request.output_dir)
    totals = {status: StatusTotal(status, 0, 0, 0) for status in STATUSES}
    failures: list[FileRecord] = []
    warnings: list[str] = []
    warning_count = 0
    with (
        _journal(request.output_dir) as journal,
        contextlib.closing(_results(plan, settings, request, journal, jobs, on_progress)) as results,
    ):
        if on_start is not None:
            on_start()
        for record, warned in results:
            _, files, rows, size = totals[record.status]
            totals[record.status] = StatusTotal(
                record.status, files + 1, rows + record.rows, size + record.bytes
            )
            if record.status == "failed" and len(failures) < MOST_KEPT:
                failures.append(record)
            warnings += warned[: MOST_KEPT - len(warnings)]
            warning_count += len(warned)
            if on_record is not None:
                on_record(record)
            if request.fail_fast and record.status == "failed":
                break
    done, skipped, failed = (totals[status].files for status in STATUSES)
    summary = BatchSummary(
        files=len(plan.jobs) + len(plan.done),
        done=done,
        skipped=skipped,
        failed=failed,
        rows=sum(total.rows for total in totals.values()),
        bytes=sum(total.bytes for total in totals.values()),
        seconds=time.perf_counter() - start,
    )
    return BatchResult(
        request.output_dir,
        summary,
        tuple(totals.values()),
        tuple(failures),
        tuple(warnings),
        warning_count,
    )


def _prepare(request: BatchRequest) -> tuple[Plan, BatchSettings, int]:
    """Find all files, and all that cannot be; read the norm; make room for the outputs."""
    check_norm(request)
    check_name(request.name)
    if request.scheduler is not None and request.engine != "dask":
        raise UsageError("--scheduler", "is for a Dask cluster", "--engine dask too")
    shard = None if request.shard is None else parse_shard(request.shard, os.environ)
    if not request.inputs and request.files_from is None:
        raise UsageError("", "no inputs", "files, directories or --files-from LIST")
    _, engine = choose_engine(request.backend, 0)
    inputs = find_inputs(
        request.inputs,
        request.files_from,
        request.separator,
        Selection(request.include, request.exclude, _real_dir(request.output_dir)),
        request.base,
    )
    all_jobs = make_plan(inputs, request.output_dir, request.name, request.dtype, request.assume_dtype)
    read = read_norm(request)
    exactness = (
        "exact" if engine.exact else f"{request.backend} {version(engine.package)} {request.device}"
    )
    parameters = _digest(request, read, exactness)
    ours = all_jobs if shard is None else all_jobs[shard.number - 1 :: shard.of]
    plan = settle(ours, request.output_dir, parameters, request.resume, request.force, request.checksum)
    jobs = request.jobs or max(1, min(cores(), len(plan.jobs)))
    largest = max((job.size for job in all_jobs), default=0)  # of all: shards and later runs agree
    backend, _ = choose_engine(request.backend, largest // ELEMENT)
    settings = BatchSettings(
        norm=read,
        axis=request.axis,
        dtype=request.dtype,
        assume_dtype=request.assume_dtype,
        backend=backend,
        device=request.device,
        threads=request.threads or (1 if request.engine == "dask" else max(1, cores() // jobs)),
        keep_others=request.keep_others,
        parameters=parameters,
        checksum=request.checksum,
    )
    return plan, settings, jobs


def _real_dir(path: str) -> str:
    return path.rstrip("/") if is_address(path) else os.path.realpath(path)


def _digest(request: BatchRequest, read: ReadNorm, exactness: str) -> str:
    """A digest of all that results depend on besides the inputs."""
    stated = norm_over(read, read.shape)  # finds what cannot be whatever the input
    norm = stated.norm
    digest = hashlib.sha256()
    said = (
        __version__,
        norm.kind,
        norm.eps,
        stated.gamma_offset,
        read.shape,
        request.axis,
        request.dtype and request.dtype.name,
        request.assume_dtype and request.assume_dtype.name,
        request.keep_others,
        exactness,
        [values is not None for values in (norm.gamma, norm.beta)],
    )
    digest.update(json.dumps(said).encode())
    for values in (norm.gamma, norm.beta):
        if values is not None:
            digest.update(values.tobytes())
    return digest.hexdigest()[:32]


def _make_folders(jobs: list[FileJob], output_dir: str) -> None:
    if is_address(output_dir):
        return  # object stores have none
    folders = {os.path.dirname(job.entry) for job in jobs}
    for folder in sorted(os.path.join(output_dir, folder) for folder in {*folders, ""}):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise OutputError(folder, reason(error)) from None


def _journal(output_dir: str) -> contextlib.AbstractContextManager[int]:
    """Open the journal of a directory; an object store keeps what is to be known beside each object."""
    return contextlib.nullcontext(-1) if is_address(output_dir) else open_journal(output_dir)


def _results(
    plan: Plan,
    settings: BatchSettings,
    request: BatchRequest,
    journal: int,
    jobs: int,
    on_progress: Callable[[Progress], None] | None,
) -> Generator[FileResult, None, None]:
    """Yield the result of each file as it comes, those done before first."""
    sizes = [job.size for job in plan.jobs]
    all_files = len(plan.jobs) + len(plan.done)
    all_bytes = sum(sizes) + sum(job.size for job, _ in plan.done)
    files = bytes_done = 0
    under_way: dict[int, int] = {}

    def tell() -> None:
        if on_progress is not None:
            on_progress(Progress(files, bytes_done + sum(under_way.values()), all_files, all_bytes))

    for job, entry in plan.done:
        files += 1
        bytes_done += job.size
        yield FileResult(
            FileRecord(job.input, job.output, "skipped", entry.rows, entry.bytes, 0.0, None), ()
        )
    tell()

    with contextlib.closing(_said(plan.jobs, settings, request, journal, jobs)) as said_of:
        for task, said in said_of:
            if isinstance(said, int):
                under_way[task] = min(said, sizes[task])
                tell()
                continue
            under_way.pop(task, None)
            files += 1
            bytes_done += sizes[task]
            yield _died(plan.jobs[task], said) if isinstance(said, WorkerDied) else said
            tell()
    if request.engine == "dask":
        remove_temporaries(plan.jobs, request.output_dir)  # of workers that were lost


def _said(
    jobs: list[FileJob], settings: BatchSettings, request: BatchRequest, journal: int, workers: int
) -> Generator[tuple[int, int | FileResult | WorkerDied], None, None]:
    """Yield what is said of each job, by its place: bytes done now and then, its result last."""
    if request.engine == "dask":
        from .batch_dask import work_on_cluster

        output_dir = request.output_dir
        return work_on_cluster(jobs, settings, output_dir, journal, request.scheduler, workers)

    def make_worker() -> Callable[[int], Iterator[int | FileResult]]:
        work = file_worker(settings, journal)
        return lambda task: work(jobs[task])

    return work_through(make_worker, len(jobs), workers)


def _died(job: FileJob, error: WorkerDied) -> FileResult:
    """The result of a file whose worker has died, and left a temporary file perhaps."""
    folder, name = os.path.split(job.output)
    for path in glob.glob(f".{glob.escape(name)}.*.tmp", root_dir=folder):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, path))
    record = FileRecord(job.input, job.output, "failed", 0, 0, 0.0, text_of(error))
    return FileResult(record, ())
