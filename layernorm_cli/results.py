"""Result records: what tasks return and reports print; fields are named as the JSON keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .norm.explanation import Explanation
    from .norm.verification import Verdict

    Float64 = npt.NDArray[np.float64]

__all__ = [
    "ApplyResult",
    "ApplySitesResult",
    "BackendInfo",
    "BatchResult",
    "BatchSummary",
    "BenchCase",
    "BenchResult",
    "Comparison",
    "Exactness",
    "Excluded",
    "ExplainResult",
    "FileRecord",
    "FileResult",
    "GradResult",
    "GradientCheck",
    "GradientRefs",
    "InspectResult",
    "ParameterStats",
    "Range",
    "RowSummary",
    "SiteChange",
    "SiteInfo",
    "SiteRows",
    "SiteVerdict",
    "StatusTotal",
    "TableRow",
    "VerifyResult",
    "VerifySitesResult",
]


class TableRow(NamedTuple):
    """One row of x: its leading indices, and its mean and var before and after."""

    row: tuple[int, ...]
    mean_before: float
    var_before: float
    mean_after: float
    var_after: float


class Range(NamedTuple):
    """The least and greatest over the rows without NaN and inf; None without such rows."""

    min: float | None
    max: float | None


class RowSummary(NamedTuple):
    """All rows in a few numbers."""

    mean_before: Range
    var_before: Range
    constant_rows: int
    nonfinite_rows: int


class ApplyResult(NamedTuple):
    """What apply did; table holds the rows shown, summary speaks of all."""

    input: str
    tensor: str | None
    output: str | None
    shape: tuple[int, ...]
    dtype: str
    output_dtype: str
    kind: str
    axis: int
    eps: float
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float
    backend: str
    rows: int
    table: tuple[TableRow, ...]
    summary: RowSummary
    warnings: tuple[str, ...]


class SiteRows(NamedTuple):
    """One site on its tensor: the averages over the rows without NaN and inf; NaN without such rows."""

    site: str
    tensor: str
    rows: int
    kind: str
    eps: float
    eps_source: str
    mean_before: float
    var_before: float
    mean_after: float
    var_after: float


class ApplySitesResult(NamedTuple):
    """What every site of a checkpoint did to its own tensor of a file."""

    input: str
    params: str
    match: str
    output: str | None
    output_tensors: tuple[str, ...]
    backend: str
    sites: tuple[SiteRows, ...]
    warnings: tuple[str, ...]


class BackendInfo(NamedTuple):
    """What there is to know of one engine; version is None where it is not installed."""

    backend: str
    version: str | None
    exactness: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    install: str


class Exactness(NamedTuple):
    """How near an engine's results are on one distribution: the fraction that is correctly rounded."""

    distribution: str
    exact_fraction: float
    max_abs_error: float


class BenchCase(NamedTuple):
    """One engine at work: seconds are the median of several passes.

    ratio_to_copy: to copying as many bytes. exact_fraction and max_abs_error are the worst of the
    distributions. peak_rss_mb: of a process that does nothing else. wrong: why the engine's results
    are out of bounds, and then it has no time.
    """

    backend: str
    dtype: str
    shape: tuple[int, ...]
    seconds: float | None
    gb_per_s: float | None
    ratio_to_copy: float | None
    exact_fraction: float
    max_abs_error: float
    peak_rss_mb: float
    wrong: str | None
    distributions: tuple[Exactness, ...]


class BenchResult(NamedTuple):
    """All engines' cases, and what was measured in words."""

    measured: str
    cases: tuple[BenchCase, ...]


class ParameterStats(NamedTuple):
    """A gamma or beta over its features; outliers are over six standard deviations off the mean."""

    mean: float
    std: float
    min: float
    max: float
    norm: float
    outliers: tuple[int, ...]


class SiteInfo(NamedTuple):
    """One norm of a checkpoint; gamma and beta name tensors, eps is None where nothing says it."""

    site: str
    kind: str
    width: int
    eps: float | None
    eps_source: str | None
    gamma: str
    beta: str | None
    gamma_offset: int
    role: str
    dtype: str
    file: str
    gamma_stats: ParameterStats
    beta_stats: ParameterStats | None
    verdict: str


class Excluded(NamedTuple):
    """A module that looks like a norm and is none, and why."""

    name: str
    reason: str


class SiteChange(NamedTuple):
    """A norm in two checkpoints: how far its gamma and beta moved.

    gamma_change and beta_change are norms of the difference over the norm in the other checkpoint (the
    difference itself where that is 0); the max ones are of single features.
    """

    site: str
    gamma_change: float
    gamma_max_change: float
    beta_change: float | None
    beta_max_change: float | None


class Comparison(NamedTuple):
    """Two checkpoints site by site; missing are the other's sites, extra are ours, without a partner."""

    checkpoint: str
    sites: tuple[SiteChange, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


class InspectResult(NamedTuple):
    """The norms of a checkpoint; strips has each site's largest |gamma| in some groups of features.

    values are gamma and beta of each site, where pictures are to be drawn from them.
    """

    checkpoint: str
    family: str | None
    architecture: str | None
    placement: str | None
    tensors: int
    parameters: int
    norm_parameters: int
    sites: tuple[SiteInfo, ...]
    excluded: tuple[Excluded, ...]
    against: Comparison | None
    strips: tuple[tuple[float, ...], ...]
    values: tuple[tuple[Float64, Float64 | None], ...]
    warnings: tuple[str, ...]


class ExplainResult(NamedTuple):
    """The steps of one row, and which tensor and parameters they are of."""

    input: str
    tensor: str | None
    shape: tuple[int, ...]
    dtype: str
    kind: str
    axis: int
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float
    rows: int
    steps: Explanation
    warnings: tuple[str, ...]


class GradientRefs(NamedTuple):
    """Where the gradients have been written; None where they have not."""

    dx: str | None
    dgamma: str | None
    dbeta: str | None


class GradientCheck(NamedTuple):
    """Gradients against finite differences: the largest relative error over all directions.

    rows: so many of the finite ones were compared.
    """

    directions: int
    rows: int
    dx: float
    dgamma: float
    dbeta: float


class GradResult(NamedTuple):
    """What grad did: as ApplyResult, where after means of dx.

    The statistics are those of the gradients over the features, in float64.
    """

    input: str
    tensor: str | None
    upstream: str
    output: str | None
    outputs: GradientRefs
    shape: tuple[int, ...]
    dtype: str
    output_dtype: str
    kind: str
    axis: int
    eps: float
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float
    backend: str
    rows: int
    table: tuple[TableRow, ...]
    summary: RowSummary
    dgamma_stats: ParameterStats
    dbeta_stats: ParameterStats
    check: GradientCheck | None
    warnings: tuple[str, ...]


class FileRecord(NamedTuple):
    """One file of a batch: status is done, skipped (it was done before) or failed.

    rows and bytes are of the tensors normalized, 0 where it failed; error is None where it did not.
    """

    input: str
    output: str
    status: str
    rows: int
    bytes: int
    seconds: float
    error: str | None


class FileResult(NamedTuple):
    """What there is to know of one file."""

    record: FileRecord
    warnings: tuple[str, ...]


class StatusTotal(NamedTuple):
    """The files of a batch that have one status."""

    status: str
    files: int
    rows: int
    bytes: int


class BatchSummary(NamedTuple):
    """All files of a batch, in how many seconds; after an early end some have no status."""

    files: int
    done: int
    skipped: int
    failed: int
    rows: int
    bytes: int
    seconds: float


class BatchResult(NamedTuple):
    """What a batch did, by status too; failures are the first files that failed, warnings the first."""

    output_dir: str
    summary: BatchSummary
    totals: tuple[StatusTotal, ...]
    failures: tuple[FileRecord, ...]
    warnings: tuple[str, ...]
    warning_count: int


class VerifyResult(NamedTuple):
    """What verify found of one tensor; input and output are x and y, eps and kind are in the verdict."""

    input: str
    tensor: str | None
    output: str
    output_tensor: str | None
    residual: str | None
    axis: int
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float
    input_dtype: str
    verdict: Verdict
    warnings: tuple[str, ...]

    @property
    def match(self) -> bool:
        """Whether Y is the norm of X."""
        return self.verdict.match


class SiteVerdict(NamedTuple):
    """What verify found of one site of a checkpoint, and in which tensors."""

    site: str
    tensor: str
    output_tensor: str
    eps_source: str
    verdict: Verdict


class VerifySitesResult(NamedTuple):
    """What verify found of every site of a checkpoint whose input and output are in a file."""

    match: bool
    input: str
    params: str
    sites: tuple[SiteVerdict, ...]
    warnings: tuple[str, ...]
