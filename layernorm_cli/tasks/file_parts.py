"""A large file of a batch in ranges of rows, which several machines do: the same bytes as in one go."""

from __future__ import annotations

import contextlib
import os
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..norm.dtypes import numpy_dtype
from ..pipeline import Sink, Summary, merged
from ..results import FileResult
from ..tensorfiles.journal import Entry
from ..tensorfiles.outputs import Output, open_part, temporary_name
from ..tensorfiles.reader import open_tensors
from ..tensorfiles.refs import Ref, is_address
from ..tensorfiles.rows import PartOfRows
from .file_job import (
    BatchSettings,
    Done,
    FileJob,
    entry_for,
    metadata_for,
    normalizer,
    result_of,
    seen_of,
    text_of,
    work_of,
    write_whole_entry,
)
from .row_table import EMPTY, row_warnings
from .stated_norm import norm_over

__all__ = ["FileParts", "begin", "do_part", "drop", "finish"]

Array = npt.NDArray[np.generic]
LEAST_BYTES = 64 << 20  # of a part: less takes no longer than to send it somewhere


class FileParts(NamedTuple):
    """A file under way: the temporary name of its output, its parts as (start, stop) rows, its entry."""

    job: FileJob
    temporary: str
    parts: tuple[tuple[int, int], ...]
    entry: Entry
    begun: float


class _Moved(NamedTuple):
    """An output whose rows are counted from first on."""

    output: Output
    first: int
    sequential: bool = False

    def write_rows(self, name: str, start: int, rows: Array) -> None:
        self.output.write_rows(name, self.first + start, rows)


def begin(settings: BatchSettings, job: FileJob, most: int) -> FileParts | None:
    """Return the parts of a job's file, most or fewer; None where it is to be done whole.

    That is so for small files, several tensors, inputs that are read in order, outputs at addresses,
    and whatever the error will be of.
    """
    if most < 2 or job.size < 2 * LEAST_BYTES or settings.keep_others or is_address(job.output):
        return None
    begun = time.perf_counter()
    with contextlib.suppress(Exception):  # who does it whole finds it again, and says so
        read, checksum = seen_of(settings, job)
        if job.seen is not None and checksum == job.seen.checksum:
            return None
        with open_tensors(Ref(job.input, job.path, job.name), settings.assume_dtype) as file:
            (x,) = file.tensors
            work = work_of(settings, x, lambda shape: norm_over(settings.norm, shape))
            source = x.rows(work.axis)
            if source.sequential:
                return None
            size = work.rows * source.width * source.storage.itemsize
            count = max(1, min(most, size // LEAST_BYTES, work.rows))
            cuts = [work.rows * number // count for number in range(count + 1)]
            parts = tuple(pairwise(cuts))
            entry = entry_for(settings, job, read, checksum, work.rows, size)
        return FileParts(job, temporary_name(job.output), parts, entry, begun)
    return None


def do_part(settings: BatchSettings, file_parts: FileParts, number: int) -> tuple[Summary, list[str]]:
    """Do one part; return what was seen of its rows, counted from the file's first, and warnings.

    Done twice, by a machine that was lost and another, it writes the same. Raises LayernormError.
    """
    job, (start, stop) = file_parts.job, file_parts.parts[number]
    with open_tensors(Ref(job.input, job.path, job.name), settings.assume_dtype) as file:
        (x,) = file.tensors
        work = work_of(settings, x, lambda shape: norm_over(settings.norm, shape))
        tensors = {work.name: (work.dtype, x.shape)}
        metadata = metadata_for(settings, file, [work])
        rows = x._replace(rows=lambda axis: PartOfRows(x.rows(axis), start, stop - start))
        normalized = normalizer(settings, lambda shape: norm_over(settings.norm, shape))
        summary = EMPTY
        with open_part(job.output, file_parts.temporary, tensors, metadata) as output:
            sink = Sink(_Moved(output, start), work.name, numpy_dtype(work.dtype))
            for _, seen in normalized(rows, work.axis, sink):
                summary = merged(summary, seen)
        return _moved(summary, start), x.warnings


def _moved(summary: Summary, start: int) -> Summary:
    constant, nonfinite = summary.first_constant, summary.first_nonfinite
    return summary._replace(
        first_constant=None if constant is None else constant + start,
        first_nonfinite=None if nonfinite is None else nonfinite + start,
    )


def finish(
    settings: BatchSettings, journal: int, file_parts: FileParts, seen: list[tuple[Summary, list[str]]]
) -> FileResult:
    """Give the output its name, when all parts are done; seen is what they returned, in their order."""
    job, entry = file_parts.job, file_parts.entry
    try:
        read, checksum = seen_of(settings, job)
        with open_tensors(Ref(job.input, job.path, job.name), settings.assume_dtype) as file:
            work = work_of(settings, file.tensors[0], lambda shape: norm_over(settings.norm, shape))
            leading = file.tensors[0].shape[: work.axis]
        if (read, checksum) != (entry.read, entry.checksum):
            entry = entry._replace(read=None, checksum=None)  # it changed: a later run does it again
        fd = os.open(file_parts.temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            write_whole_entry(journal, entry, fd, file_parts.temporary)
        finally:
            os.close(fd)
        os.replace(file_parts.temporary, job.output)
    except Exception as error:
        return drop(file_parts, text_of(error))
    summary = EMPTY
    for part, _ in seen:
        summary = merged(summary, part)
    warnings = dict.fromkeys(warning for _, warned in seen for warning in warned)
    told = row_warnings(summary, job.input, work.stated.norm, work.dtype, leading)
    done = Done("done", entry.rows, entry.bytes, (*warnings, *told))
    return result_of(job, done, time.perf_counter() - file_parts.begun)


def drop(file_parts: FileParts, error: str) -> FileResult:
    """Remove what there is of the output, and return the result of a file that failed."""
    with contextlib.suppress(OSError):
        os.unlink(file_parts.temporary)
    seconds = time.perf_counter() - file_parts.begun
    return result_of(file_parts.job, Done("failed", 0, 0), seconds, error)
