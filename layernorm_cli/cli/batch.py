"""layernorm batch X..."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

import typer

from ..errors import FilesFailed, OutputError, UsageError
from . import options as o

__all__ = ["EXAMPLES", "batch"]

EXAMPLES = (
    "layernorm batch acts --gamma gamma.npy --output-dir normed",
    "layernorm batch 'acts.safetensors#h.*.input' --keep-others --output-dir normed --resume",
    "find acts -name '*.npy' -print0 | layernorm batch -0 --files-from - --output-dir normed",
)
MOST_WARNINGS = 20


class EngineName(str, Enum):
    """Who does the files."""

    local = "local"
    dask = "dask"


def batch(
    x: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="X...",
            help="Files and directories; FILE#TENSOR, FILE#GLOB and DIR#GLOB for tensors in them.",
        ),
    ] = None,
    output_dir: Annotated[
        str,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            envvar="LAYERNORM_OUTPUT_DIR",
            help="Where the outputs go, in a tree as the inputs are in; made if it is not there.",
        ),
    ] = ...,  # type: ignore[assignment]  # typer's mark of what must be given
    files_from: Annotated[
        str | None,
        typer.Option(
            "--files-from",
            metavar="FILE",
            envvar="LAYERNORM_FILES_FROM",
            help="A list with more of X, a line each; - is standard input. Outputs mirror their paths.",
        ),
    ] = None,
    null: Annotated[
        bool,
        typer.Option("--null", "-0", envvar="LAYERNORM_NULL", help="The list has a NUL behind each X."),
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="GLOB",
            envvar="LAYERNORM_INCLUDE",
            help="Files of directories to take; '*.npy', '*.npz' and '*.safetensors' if not given.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            envvar="LAYERNORM_EXCLUDE",
            help="Files and directories in directories to leave out, as hidden ones are.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            envvar="LAYERNORM_BASE",
            help="Outputs mirror the tree below this directory, which all inputs are in.",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="TEMPLATE",
            envvar="LAYERNORM_NAME",
            help="Names of outputs, of {stem}, {suffix}, {name}, {parent}: '{stem}.ln{suffix}'.",
        ),
    ] = "{stem}{suffix}",
    keep_others: Annotated[
        bool,
        typer.Option(
            "--keep-others",
            envvar="LAYERNORM_KEEP_OTHERS",
            help="Copy the other tensors of a .safetensors file as they are; left out if not given.",
        ),
    ] = False,
    gamma: o.Gamma = None,
    beta: o.Beta = None,
    params: o.Params = None,
    site: o.Site = None,
    eps: o.Eps = None,
    kind: o.Kind = None,
    gamma_offset: o.GammaOffset = None,
    axis: o.Axis = -1,
    dtype: o.DType = None,
    assume_dtype: o.AssumeDtype = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            envvar="LAYERNORM_RESUME",
            help="Skip what is done already, from the same input with the same options; do the rest.",
        ),
    ] = False,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum",
            envvar="LAYERNORM_CHECKSUM",
            help="Know inputs again by their content, not by path, size and time of change.",
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            envvar="LAYERNORM_SHARD",
            help="Every N-th file from the I-th on, I from 1 to N; slurm takes them from the array job.",
        ),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            envvar="LAYERNORM_FAIL_FAST",
            help="End with the first file that fails; files begun are dropped.",
        ),
    ] = False,
    manifest: Annotated[
        str | None,
        typer.Option(
            "--manifest",
            metavar="FILE",
            envvar="LAYERNORM_MANIFEST",
            help="Write the manifest there; by default to standard output, but not to a terminal.",
        ),
    ] = None,
    force: o.Force = False,
    engine: Annotated[
        EngineName,
        typer.Option(
            "--engine",
            envvar="LAYERNORM_ENGINE",
            help="Who does the files: processes here, or workers of a Dask cluster.",
        ),
    ] = EngineName.local,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS",
            envvar="LAYERNORM_SCHEDULER",
            help="The cluster's scheduler, tcp://HOST:PORT; without it, a cluster of --jobs here.",
        ),
    ] = None,
    backend: o.Backend = "auto",
    device: o.Device = "cpu",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            parser=o.count,
            envvar="LAYERNORM_JOBS",
            help="Files at a time, each in a process; as many as cores if not given.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            parser=o.count,
            envvar="LAYERNORM_THREADS",
            help="Workers within a file; the cores over the jobs if not given.",
        ),
    ] = None,
    quiet: o.Quiet = False,
    progress: o.Progress = None,
    debug: o.Debug = False,
) -> None:
    """Normalize many files.

    Prints a manifest: a line of JSON for each file as it ends, and a summary. A file that cannot be
    normalized does not stop the others; then the exit code is 5. What stands in the way of all is
    found before anything is written.
    """
    from ..norm.dtypes import float_dtype
    from ..norm.spec import parse_eps
    from ..reports.batch import batch_table, manifest_line, summary_line
    from ..results import FileRecord
    from ..tasks.batch import BatchRequest, Progress
    from ..tasks.batch import batch as run
    from ..tensorfiles.outputs import STDOUT, canonical
    from .terminal import files_bar, print_table, stdout_is_terminal, warn

    manifest = canonical(manifest)
    if manifest is None and not quiet and not stdout_is_terminal():
        manifest = STDOUT
    request = BatchRequest(
        inputs=tuple(x or ()),
        output_dir=output_dir,
        files_from=files_from,
        separator=b"\0" if null else b"\n",
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        base=base,
        name=name,
        keep_others=keep_others,
        gamma=gamma,
        beta=beta,
        params=params,
        site=site,
        eps=None if eps is None else parse_eps(eps),
        kind=kind.value if kind else None,
        gamma_offset=gamma_offset,
        axis=axis,
        dtype=float_dtype(dtype) if dtype else None,
        assume_dtype=float_dtype(assume_dtype) if assume_dtype else None,
        force=force,
        resume=resume,
        checksum=checksum,
        shard=shard,
        fail_fast=fail_fast,
        engine=engine.value,
        scheduler=scheduler,
        backend=backend,
        device=device,
        jobs=jobs,
        threads=threads,
    )
    with (
        manifest_writer(manifest, force or resume) as (open_manifest, write_line),
        files_bar(False if quiet else progress) as tell,
    ):

        def on_record(record: FileRecord) -> None:
            write_line(manifest_line(record))

        def on_progress(progress: Progress) -> None:
            tell(*progress)

        result = run(request, open_manifest, on_record, on_progress)
        write_line(summary_line(result.summary))
    if manifest != STDOUT and not quiet:
        print_table(batch_table(result))
    if not quiet:
        if not result.summary.files and not shard:
            warn("no files found")
        for message in result.warnings[:MOST_WARNINGS]:
            warn(message)
        if result.warning_count > MOST_WARNINGS:
            warn(f"{result.warning_count - MOST_WARNINGS} more warnings")
    summary = result.summary
    if summary.failed:
        first = result.failures[0]
        found = f"{summary.failed} of {summary.files} files failed; the first is {first.input}"
        raise FilesFailed("", found, None, "--resume when what the manifest says is mended")


@contextmanager
def manifest_writer(
    path: str | None, replace: bool
) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """Yield a function that opens the manifest, and one that writes a line, which is there at once.

    Raises UsageError for a file that is there if it may not be replaced.
    """
    from ..tensorfiles.exact_io import reason
    from ..tensorfiles.outputs import STDOUT
    from .terminal import flush, write

    if path is None:
        yield lambda: None, lambda line: None
        return
    if path == STDOUT:

        def print_line(line: str) -> None:
            write(line)
            flush()

        yield lambda: None, print_line
        return
    if path.endswith((".npy", ".npz", ".safetensors")):
        raise UsageError(f"--manifest {path}", "is called as a tensor file", "a name such as m.jsonl")
    if os.path.isfile(path) and not replace:
        raise UsageError(f"--manifest {path}", "exists already", "a new name", "--resume or --force")
    file = None

    def open_manifest() -> None:
        nonlocal file
        try:
            file = open(path, "w", buffering=1, encoding="ascii")  # noqa: SIM115  # closed below
        except OSError as error:
            raise OutputError(path, reason(error)) from None

    def write_line(line: str) -> None:
        assert file is not None
        try:
            file.write(line)
        except OSError as error:
            raise OutputError(path, reason(error)) from None

    try:
        yield open_manifest, write_line
    finally:
        if file is not None:
            file.close()
