"""The plan of a batch: which file becomes which output, what is done already, and what cannot be."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import string
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import OutputError, UsageError
from ..norm.dtypes import DType
from ..tensorfiles.exact_io import reason
from ..tensorfiles.journal import Entry, Stamp, entry_of, read_journals, stamp_of
from ..tensorfiles.outputs import SUFFIXES, name_of_temporary
from ..tensorfiles.refs import is_address, without_secrets
from .batch_inputs import SUFFIXES as INPUT_SUFFIXES
from .batch_inputs import BatchInput
from .file_job import FileJob

__all__ = ["Plan", "Shard", "check_name", "make_plan", "parse_shard", "remove_temporaries", "settle"]

PLACEHOLDERS = ("stem", "suffix", "name", "parent")
LABELS_AT_ONCE = 16
DEFAULT_NAME = "{stem}{suffix}"


class Shard(NamedTuple):
    """Which part of the files: the number-th of each of files, counted from 1."""

    number: int
    of: int


class Plan(NamedTuple):
    """What is left to do, and what is done: jobs with the journal's entries of their outputs."""

    jobs: list[FileJob]
    done: list[tuple[FileJob, Entry]]


def parse_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """Return the shard that I/N means, or for slurm the one of this task of an array job.

    Raises UsageError for anything else.

    >>> parse_shard("2/8", {})
    Shard(number=2, of=8)
    >>> array = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "6"}
    >>> parse_shard("slurm", array | {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_STEP": "2"})
    Shard(number=3, of=4)
    """
    if text == "slurm":
        return _slurm_shard(environ)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    shard = Shard(int(match[1]), int(match[2])) if match else None
    if shard is None or not 1 <= shard.number <= shard.of:
        expected = "I/N with I from 1 to N, or slurm in a task of an array job"
        raise UsageError(f"--shard {text}", "not a shard", expected)
    return shard


def _slurm_shard(environ: Mapping[str, str]) -> Shard:
    values = {}
    for name in ("ID", "MIN", "MAX", "STEP", "COUNT"):
        variable = f"SLURM_ARRAY_TASK_{name}"
        text = environ.get(variable, "1" if name == "STEP" else "")
        if not re.fullmatch(r"[0-9]{1,9}", text):
            found = f"{variable} is {text!r}" if text else f"{variable} is not set"
            expected = "a task of an array job (sbatch --array=1-N)"
            raise UsageError("--shard slurm", found, expected, "--shard I/N")
        values[name] = int(text)
    number, rest = divmod(values["ID"] - values["MIN"], max(values["STEP"], 1))
    count = (values["MAX"] - values["MIN"]) // max(values["STEP"], 1) + 1
    if rest or count != values["COUNT"] or not 0 <= number < count:
        found = "the ids of the array have holes"
        raise UsageError("--shard slurm", found, "sbatch --array=FIRST-LAST", "--shard I/N")
    return Shard(number + 1, count)


def check_name(template: str) -> str:
    """Return the template of the outputs' names; Raises UsageError for what is not in PLACEHOLDERS."""
    where, expected = f"--name {template}", ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(where, str(error).lower(), expected) from None
    for _, name, form, conversion in fields:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            raise UsageError(where, f"unknown placeholder {{{name}}}", expected)
    if not any(name in ("stem", "name") for _, name, _, _ in fields):
        raise UsageError(where, "the same name for all files", "{stem} or {name} in it")
    return template


def make_plan(
    inputs: Iterable[BatchInput], output_dir: str, template: str, dtype: DType | None, raw: DType | None
) -> list[FileJob]:
    """Return a job for each input; raw is what untyped elements are taken for.

    An input given twice counts once. An output of an earlier run that is found among the inputs is none.

    Raises UsageError where two inputs have one output, an output is an input, or its name is none.
    """
    real = _RealPaths()
    jobs = [_job(one, output_dir, template, dtype or raw, real) for one in inputs]
    outputs = {job: real.of(job.output) for job in jobs}
    own = _own_outputs(outputs, output_dir)
    by_output: dict[str, FileJob] = {}
    for job, output in outputs.items():
        if job.real in own:
            continue
        other = by_output.setdefault(output, job)
        if (other.real, other.name) != (job.real, job.name):
            found = f"is the output of {other.input} and of {job.input}"
            raise UsageError(job.output, found, "an output for each", "--name with {parent}, or --base")
    return list(by_output.values())


def _own_outputs(outputs: dict[FileJob, str], output_dir: str) -> set[str]:
    """The inputs that are outputs as well; Raises UsageError for one that the journal does not know."""
    inputs = {job.real for job in outputs}
    both = {output: job for job, output in outputs.items() if output in inputs}
    made = {entry.output for entry in read_journals(output_dir)} if both else set()
    for job in both.values():
        if job.entry not in made:
            found = f"is the output of {job.input} and an input itself"
            raise UsageError(job.output, found, None, "another --output-dir, or --name")
    return set(both)


class _RealPaths:
    """The real paths of files; what is true of a directory, which many share, is found once."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._new: set[str] = set()

    def of(self, path: str, is_link: bool | None = None) -> str:
        """Return the real path of a file, which may be known to be a link or none."""
        if is_address(path):
            return path
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
            if not os.path.isdir(folder or os.curdir):
                self._new.add(folder)
        if is_link or (is_link is None and folder not in self._new and os.path.islink(path)):
            return os.path.realpath(path)
        return os.path.join(self._folders[folder], name)


def _job(
    one: BatchInput, output_dir: str, template: str, dtype: DType | None, real: _RealPaths
) -> FileJob:
    entry = _entry(one, template, dtype)
    size, is_link = 0, False
    if not is_address(one.path):
        with contextlib.suppress(OSError):  # found when its turn comes
            status = os.lstat(one.path)
            is_link = stat.S_ISLNK(status.st_mode)
            size = (os.stat(one.path) if is_link else status).st_size
    path = real.of(without_secrets(one.path), is_link)
    return FileJob(one.path, one.name, path, size, output_dir, entry)


def _entry(one: BatchInput, template: str, dtype: DType | None) -> str:
    """The path of an output below the directory of all."""
    folder, file = os.path.split(one.place)
    suffix = next((suffix for suffix in INPUT_SUFFIXES if file.endswith(suffix)), "")
    fits_npy = suffix == ".npy" and (dtype is None or (dtype.in_numpy and dtype.itemsize > 1))
    parent = ""
    if "{parent}" in template:
        parent = os.path.basename(os.path.dirname(os.path.abspath(one.path)))
    name = template.format(
        stem=file.removesuffix(suffix),
        suffix=".npy" if fits_npy else ".safetensors",
        name=file,
        parent=parent,
    )
    if name.startswith("/") or os.pardir in name.split("/"):
        raise UsageError(f"--name {template}", f"leads out of the directory: {name}", "a name in it")
    if not name.endswith(SUFFIXES):
        expected = f"a name ending in {' or '.join(SUFFIXES)}"
        raise UsageError(f"--name {template}", f"unknown output format of {name}", expected)
    entry = os.path.join(folder, name)
    return os.path.normpath(entry) if "/" in name else entry


def settle(
    jobs: list[FileJob], output_dir: str, parameters: str, resume: bool, force: bool, checksum: bool
) -> Plan:
    """Look at what is there of the outputs: make way for the jobs, and tell what need not be done.

    Temporary files of runs that were killed are removed, or get their name where they are whole.

    Raises UsageError for an output that is there without force or resume, OutputError for what cannot
    be replaced.
    """
    elsewhere = is_address(output_dir)
    look = _what_is_elsewhere if elsewhere else _what_is_there
    whole, temporaries = look({job.entry for job in jobs}, output_dir)
    if whole and not (force or resume):
        first = next(job.output for job in jobs if job.entry in whole)
        more = f", and {len(whole) - 1} more outputs" if len(whole) > 1 else ""
        hint = "--resume to go on where it ended, --force to replace"
        raise UsageError(first, f"exists already{more}", "no outputs yet", hint)
    known: dict[str, Entry] = {}
    if resume and elsewhere:
        known = _known_elsewhere([job for job in jobs if job.entry in whole], parameters)
    elif resume:
        known = _known(whole, temporaries, output_dir, parameters)
    for path in temporaries:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    plan = Plan([], [])
    for job in jobs:
        entry = known.get(job.entry)
        if entry is None or entry.name != job.name:
            plan.jobs.append(job)
        elif checksum:
            plan.jobs.append(job._replace(seen=entry) if entry.checksum else job)
        elif entry.input == job.real and entry.read is not None and _stamp(job.path) == entry.read:
            plan.done.append((job, entry))
        else:
            plan.jobs.append(job)
    return plan


def remove_temporaries(jobs: list[FileJob], output_dir: str) -> None:
    """Remove what workers that were lost have left, when nobody works on these jobs any more."""
    if is_address(output_dir):
        return
    _, temporaries = _what_is_there({job.entry for job in jobs}, output_dir)
    for path in temporaries:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _what_is_there(entries: set[str], output_dir: str) -> tuple[dict[str, Stamp], set[str]]:
    """The outputs that are there, and the paths of temporary files of any."""
    whole: dict[str, Stamp] = {}
    temporaries = set()
    for folder in {os.path.dirname(entry) for entry in entries}:
        try:
            with os.scandir(os.path.join(output_dir, folder)) as scan:
                for found in scan:
                    entry = os.path.join(folder, found.name)
                    becoming = name_of_temporary(found.name)
                    if entry in entries:
                        if found.is_dir():
                            raise OutputError(found.path, "is a directory", "a file, or nothing yet")
                        whole[entry] = _stamp(found.path) or Stamp(0, 0)
                    elif becoming is not None and os.path.join(folder, becoming) in entries:
                        temporaries.add(found.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(os.path.join(output_dir, folder), reason(error)) from None
    return whole, temporaries


def _what_is_elsewhere(entries: set[str], output_dir: str) -> tuple[dict[str, Stamp], set[str]]:
    """The outputs that are there at an address, which knows no temporary files."""
    from ..tensorfiles.remote import find_remote

    found = find_remote(output_dir) or {}
    return {entry: Stamp(*found[entry]) for entry in entries & set(found)}, set()


def _known_elsewhere(jobs: list[FileJob], parameters: str) -> dict[str, Entry]:
    """What the labels of outputs at addresses say, of those made with these parameters."""
    from concurrent.futures import ThreadPoolExecutor

    from ..tensorfiles.remote import label_of

    with ThreadPoolExecutor(LABELS_AT_ONCE) as pool:
        labels = pool.map(lambda job: label_of(job.output), jobs)
        found = (
            entry_of(label, job.entry, job.real, job.name)
            for job, label in zip(jobs, labels, strict=True)
            if label is not None
        )
        return {entry.output: entry for entry in found if entry and entry.parameters == parameters}


def _known(
    whole: dict[str, Stamp], temporaries: set[str], output_dir: str, parameters: str
) -> dict[str, Entry]:
    """The journal's entries of outputs that are there as it says, and made with these parameters.

    An output that is whole, but was to be renamed when its program was killed, is renamed.
    """
    known = {}
    for entry in read_journals(output_dir):
        if entry.parameters != parameters:
            continue
        path = os.path.join(output_dir, entry.output)
        temporary = os.path.join(os.path.dirname(path), entry.temporary)
        if temporary in temporaries and _stamp(temporary) == entry.made:
            os.replace(temporary, path)
            temporaries.remove(temporary)
            whole[entry.output] = entry.made
        if whole.get(entry.output) == entry.made:
            known[entry.output] = entry
    return known


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
