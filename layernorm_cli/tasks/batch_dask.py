"""The jobs of a batch as futures on a Dask cluster; the only module that imports Dask, and late."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError, MissingEngine, UsageError
from ..pipeline import Summary
from ..results import FileResult
from ..tensorfiles.journal import open_journal
from ..tensorfiles.refs import is_address
from .file_job import BatchSettings, Done, FileJob, file_worker, result_of, text_of
from .file_parts import FileParts, begin, do_part, drop, finish

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["work_on_cluster"]

CONNECT = 10.0  # seconds
FIRST_WORKER = 60.0  # seconds until a cluster has one
AHEAD = 4  # futures for each thread of the cluster that are known to the scheduler
PARTS = 4  # of a large file for each thread
INSTALL = "pip install 'layernorm[dask]'"

PartSeen = tuple[Summary, list[str]]


def work_on_cluster(
    jobs: list[FileJob],
    settings: BatchSettings,
    output_dir: str,
    journal: int,
    scheduler: str | None,
    workers: int,
) -> Generator[tuple[int, int | FileResult], None, None]:
    """Do the jobs on a cluster, or on one of so many local processes; yield each with its result.

    The workers see the same files as this process. Large files are cut into ranges of rows, others
    done whole. What a lost worker was doing is done again by another. Closing the iterator cancels
    what is left.

    Raises MissingEngine without Dask, UsageError for an address that is none, InputError where no
    scheduler answers, or it has no workers.
    """
    try:
        import distributed
    except ImportError:
        raise MissingEngine("--engine dask", "Dask is not installed", None, INSTALL) from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost workers are no news to users
    with _client(scheduler, workers) as client:
        shared = client.submit(_itself, settings, pure=False)  # not scattered: a lost one is made again
        threads = max(1, sum(client.nthreads().values()))
        todo = enumerate(jobs)
        under_way: dict[Future, _Piece] = {}
        files: dict[int, _File] = {}
        ready = distributed.as_completed([], loop=client.loop, raise_errors=False)

        def submit() -> bool:
            """Make futures of the next job; False where there is none."""
            for task, job in todo:
                cut = begin(settings, job, threads * PARTS)
                if cut is None:
                    add(_Piece(task), client.submit(_do_file, shared, job, output_dir, pure=False))
                else:
                    files[task] = _File(cut, [None] * len(cut.parts))
                    for number in range(len(cut.parts)):
                        add(
                            _Piece(task, number),
                            client.submit(_do_part, shared, cut, number, pure=False),
                        )
                return True
            return False

        def add(piece: _Piece, future: Future) -> None:
            under_way[future] = piece
            ready.add(future)

        try:
            while len(under_way) < threads * AHEAD and submit():
                pass
            while under_way:
                future = next(ready)
                piece = under_way.pop(future)
                said = _said(future)
                if piece.number is None:
                    job = jobs[piece.task]
                    failed = result_of(job, Done("failed", 0, 0), 0.0, str(said))
                    yield piece.task, said if isinstance(said, FileResult) else failed
                else:
                    yield from _part_done(settings, journal, files, piece, said)
                while len(under_way) < threads * AHEAD and submit():
                    pass
        finally:
            for file in files.values():
                drop(file.cut, "")
            client.cancel(list(under_way), force=True)


class _Piece(NamedTuple):
    """What a future does: a task, or a part of it."""

    task: int
    number: int | None = None


class _File(NamedTuple):
    """A file in parts, and what was seen of those done."""

    cut: FileParts
    seen: list[PartSeen | None]


def _part_done(
    settings: BatchSettings, journal: int, files: dict[int, _File], piece: _Piece, said: object
) -> Iterator[tuple[int, int | FileResult]]:
    """Yield how far the file is, and its result with the last part, or the first that failed."""
    file = files.get(piece.task)
    if file is None or piece.number is None:
        return  # another part has failed
    if isinstance(said, str):
        del files[piece.task]
        yield piece.task, drop(file.cut, said)
        return
    assert isinstance(said, tuple)
    file.seen[piece.number] = said
    seen = [part for part in file.seen if part is not None]
    if len(seen) == len(file.seen):
        del files[piece.task]
        yield piece.task, finish(settings, journal, file.cut, seen)
    else:
        yield piece.task, file.cut.entry.bytes * len(seen) // len(file.seen)


def _said(future: Future) -> object:
    """What a future returned; text where it failed.

    A result that was lost with the worker that kept it is waited for again.
    """
    import distributed

    try:
        return future.result()
    except distributed.KilledWorker:
        return "the workers that did it died, one after another; if memory ran out, fewer of them help"
    except distributed.CancelledError:
        raise InputError("--engine dask", "the scheduler has dropped the work, or is lost") from None
    except Exception as error:
        return text_of(error)


@contextlib.contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Client]:
    import distributed

    with contextlib.ExitStack() as closing:
        cluster = scheduler
        if scheduler is None:
            cluster = closing.enter_context(
                distributed.LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    dashboard_address=None,
                    silence_logs=logging.CRITICAL,
                )
            )
        where = f"--scheduler {scheduler}"
        try:
            client = distributed.Client(cluster, timeout=CONNECT, set_as_default=False)
        except ValueError as error:
            raise UsageError(where, str(error).lower(), "tcp://HOST:PORT") from None
        except OSError:
            raise InputError(where, "no scheduler answers", "tcp://HOST:PORT of a running one") from None
        with client:
            try:
                client.wait_for_workers(1, timeout=FIRST_WORKER)
            except TimeoutError:
                raise InputError(where, "the cluster has no workers", "one or more") from None
            yield client


def _itself(settings: BatchSettings) -> BatchSettings:
    return settings


def _do_part(settings: BatchSettings, cut: FileParts, number: int) -> PartSeen | str:
    """On a worker: do a part; an error of the file is told as text."""
    try:
        return do_part(settings, cut, number)
    except Exception as error:
        return text_of(error)


_here = threading.local()


def _do_file(settings: BatchSettings, job: FileJob, output_dir: str) -> FileResult:
    """On a worker: do a file, with what this thread has prepared for those before."""
    if getattr(_here, "settings", None) is not settings:
        files = contextlib.ExitStack()
        journal = -1 if is_address(output_dir) else files.enter_context(open_journal(output_dir))
        if hasattr(_here, "files"):
            _here.files.close()
        _here.settings, _here.files, _here.work = settings, files, file_worker(settings, journal)
    *_, result = _here.work(job)
    assert isinstance(result, FileResult)
    return result
