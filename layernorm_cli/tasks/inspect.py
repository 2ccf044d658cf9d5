"""layernorm inspect: the norms of a checkpoint, judged by their gamma and beta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoints.names import clean_path, sites_meant
from ..checkpoints.placement import placement_of, roles_of
from ..checkpoints.sites import Site
from ..checkpoints.statistics import stats_of, verdict_of
from ..checkpoints.survey import Parameters, Survey, read_parameters, survey
from ..errors import InputError
from ..results import Comparison, InspectResult, SiteChange, SiteInfo
from ..tensorfiles.refs import without_secrets

__all__ = ["FAILING", "InspectRequest", "inspect"]

Float64 = npt.NDArray[np.float64]
FAILING = ("nonfinite", "zero")
STRIP = 24
FOLDED = "folded"  # in the metadata of a checkpoint that says so of itself


class InspectRequest(NamedTuple):
    """Which checkpoint to look at; site narrows to a pattern; against is another to compare with."""

    checkpoint: str
    site: str | None = None
    against: str | None = None
    values: bool = False


def inspect(request: InspectRequest) -> InspectResult:
    """Find the norms of a checkpoint, and return what each is and what it has learned.

    Raises InputError and its FormatError for what is missing or malformed.
    """
    found = survey(request.checkpoint)
    config, checkpoint = found.config, found.checkpoint
    chosen = _chosen(found, request.site)
    roles = roles_of(found.sites, config)
    infos, strips, values, kept = {}, {}, {}, {}
    for site, parameters in read_parameters(found, found.sites):
        infos[site.site] = _info(site, parameters, roles[site.site])
        strips[site.site] = _strip(parameters.gamma)
        if request.values:
            values[site.site] = (parameters.gamma, parameters.beta)
        if request.against is not None:
            kept[site.site] = parameters
    infos = _with_folded(infos, FOLDED in checkpoint.metadata)
    return InspectResult(
        checkpoint=without_secrets(request.checkpoint),
        family=None if config is None else config.whole.family,
        architecture=None if config is None else config.architecture,
        placement=placement_of(found.sites, config),
        tensors=len(checkpoint.tensors),
        parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        norm_parameters=sum(
            math.prod(checkpoint.tensors[name].shape)
            for site in found.sites
            for name in (site.gamma, site.beta)
            if name is not None
        ),
        sites=tuple(infos[site.site] for site in chosen),
        excluded=found.excluded,
        against=None if request.against is None else _compared(request.against, chosen, kept),
        strips=tuple(strips[site.site] for site in chosen),
        values=tuple(values[site.site] for site in chosen) if request.values else (),
        warnings=found.warnings,
    )


def _with_folded(infos: dict[str, SiteInfo], folded: bool) -> dict[str, SiteInfo]:
    """Call folded what is as it was made, beside others that are trained."""
    if not folded and all(info.verdict != "trained" for info in infos.values()):
        return infos
    return {
        name: info._replace(verdict="folded") if info.verdict == "identity" else info
        for name, info in infos.items()
    }


def _chosen(found: Survey, pattern: str | None) -> Sequence[Site]:
    """The sites that a pattern matches, to their names' end at least."""
    if pattern is None:
        return found.sites
    patterns = (pattern, f"*.{pattern}", f"*/{pattern}")
    chosen = [site for site in found.sites if any(fnmatchcase(site.site, p) for p in patterns)]
    if not chosen:
        names = ", ".join(site.site for site in found.sites[:6]) or "none at all"
        raise InputError(f"--site {pattern}", "no such site", None, f"a pattern of names: {names}, ...")
    return chosen


def _info(site: Site, parameters: Parameters, role: str) -> SiteInfo:
    return SiteInfo(
        site=site.site,
        kind=site.kind,
        width=site.width,
        eps=site.eps,
        eps_source=site.eps_source,
        gamma=site.gamma,
        beta=site.beta,
        gamma_offset=site.gamma_offset,
        role=role,
        dtype=site.dtype,
        file=without_secrets(site.file),
        gamma_stats=stats_of(parameters.gamma),
        beta_stats=None if parameters.beta is None else stats_of(parameters.beta),
        verdict=verdict_of(site, parameters),
    )


def _strip(gamma: Float64) -> tuple[float, ...]:
    starts = np.arange(min(STRIP, gamma.size)) * gamma.size // min(STRIP, gamma.size)
    return tuple(np.maximum.reduceat(np.abs(gamma.reshape(-1)), starts).tolist())


def _compared(path: str, sites: Sequence[Site], parameters: dict[str, Parameters]) -> Comparison:
    """How the sites differ from those of the same names in another checkpoint, wrappers aside."""
    other = survey(path)
    theirs = {site.site: theirs for site, theirs in read_parameters(other, other.sites)}
    by_path = {clean_path(site.site): site.site for site in other.sites}
    changes, extra = [], []
    used = set()
    for site in sites:
        partner = _partner(clean_path(site.site), by_path)
        if partner is None:
            extra.append(site.site)
            continue
        used.add(partner)
        changes.append(_change(site.site, parameters[site.site], theirs[partner], path))
    missing = [site.site for site in other.sites if site.site not in used]
    return Comparison(without_secrets(path), tuple(changes), tuple(missing), tuple(extra))


def _partner(path: str, by_path: dict[str, str]) -> str | None:
    """The site of the same path, or the only one whose path is the end of this, or this of it."""
    if path in by_path:
        return by_path[path]
    meant = sites_meant(path, by_path) or [other for other in by_path if path.endswith(f".{other}")]
    return by_path[meant[0]] if len(meant) == 1 else None


def _change(name: str, ours: Parameters, theirs: Parameters, path: str) -> SiteChange:
    if ours.gamma.shape != theirs.gamma.shape:
        raise InputError(
            f"{without_secrets(path)}#{name}",
            f"gamma has shape {theirs.gamma.shape}",
            f"{ours.gamma.shape}, as here",
        )
    gamma = _relative(ours.gamma, theirs.gamma)
    if ours.beta is None or theirs.beta is None:
        return SiteChange(name, *gamma, None, None)
    return SiteChange(name, *gamma, *_relative(ours.beta, theirs.beta))


def _relative(ours: Float64, theirs: Float64) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        difference = ours - theirs
        norm = float(np.linalg.norm(theirs))
        return float(np.linalg.norm(difference)) / (norm or 1.0), float(np.abs(difference).max())
