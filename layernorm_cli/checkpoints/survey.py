"""A checkpoint with its norms found: what inspect shows, and where apply takes its parameters from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..norm.rounding import widen_into
from ..results import Excluded
from ..tensorfiles.bytes_at import join, read_small
from ..tensorfiles.refs import without_secrets
from ..tensorfiles.sharded import Checkpoint, open_checkpoint, read_tensors
from .config import Config, make_config
from .names import sites_meant
from .sites import Site, find_norms

__all__ = ["Parameters", "Survey", "find_site", "find_sites", "read_parameters", "survey"]

Float64 = npt.NDArray[np.float64]
LISTED = 12


class Survey(NamedTuple):
    """A checkpoint, the config beside it, its norms in natural order, and what only looks like one."""

    checkpoint: Checkpoint
    config: Config | None
    sites: tuple[Site, ...]
    excluded: tuple[Excluded, ...]
    warnings: tuple[str, ...]


class Parameters(NamedTuple):
    """What a site stores, exactly, in float64: gamma, beta or None, both in gamma's shape.

    The site's gamma_offset is not in gamma, the scale of a float8 gamma is.
    """

    gamma: Float64
    beta: Float64 | None


def survey(path: str) -> Survey:
    """Open a checkpoint and find its norms; path is a file, an index, a directory or an address.

    Raises InputError and its FormatError for what is missing or malformed.
    """
    checkpoint = open_checkpoint(path)
    config, warnings = _config_beside(checkpoint)
    sites, excluded = find_norms(checkpoint.tensors, config)
    scaled = (
        f"{without_secrets(site.file)}#{site.gamma}: {site.dtype}, times its scale {site.gamma_scale}"
        for site in sites
        if site.gamma_scale is not None
    )
    every = (*checkpoint.warnings, *warnings, *scaled)
    return Survey(checkpoint, config, tuple(sites), tuple(excluded), every)


def find_sites(path: str) -> tuple[Site, ...]:
    """Return the layer and rms norms of a checkpoint in natural order: h.2 before h.10.

    path is a .safetensors or .npz file, an index of shards, a directory, or the address of one. Only
    headers and config.json are read; a site's gamma and beta are names of tensors in its file.

    Raises InputError for a missing file, shard or tensor, FormatError for a malformed one.

    >>> import os, tempfile, numpy
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_file({"h.0.ln_1.weight": numpy.ones(4), "h.0.ln_1.bias": numpy.zeros(4)}, path)
    >>> [(site.site, site.kind, site.gamma) for site in find_sites(path)]
    [('h.0.ln_1', 'layer', 'h.0.ln_1.weight')]
    """
    return survey(path).sites


def find_site(found: Survey, name: str) -> Site:
    """Return the site of this name, or the only one whose name ends so.

    Raises InputError that lists the candidates where there is none, or more than one.
    """
    names = [site.site for site in found.sites]
    where = without_secrets(found.checkpoint.path)
    if not names:
        raise InputError(where, "no layer norm found in it", None, f"layernorm inspect {where}")
    meant = sites_meant(name, names)
    if len(meant) == 1:
        return found.sites[names.index(meant[0])]
    if meant:
        raise InputError(
            f"--site {name}", f"{len(meant)} sites end so", "one", f"one of: {_listed(meant)}"
        )
    alike = [site for site in names if name.lower() in site.lower()] or names
    raise InputError(f"--site {name}", f"no such site in {where}", None, f"one of: {_listed(alike)}")


def read_parameters(found: Survey, sites: Iterable[Site]) -> Iterator[tuple[Site, Parameters]]:
    """Read the gamma and beta of these sites, and yield them one by one; Raises InputError, FormatError.

    All are read at first, as they are stored; one at a time is float64, in memory that is used again.
    """
    sites = list(sites)
    names = (name for site in sites for name in (site.gamma, site.beta, site.gamma_scale) if name)
    arrays = read_tensors(found.checkpoint, names)
    for site in sites:
        gamma = _wide(arrays[site.gamma])
        if site.gamma_scale is not None:
            scale = _wide(arrays[site.gamma_scale])
            if scale.size != 1:
                where = f"{without_secrets(site.file)}#{site.gamma_scale}"
                raise InputError(where, f"scales of shape {scale.shape}", "one scale for all of gamma")
            gamma *= scale.reshape(())
        yield site, Parameters(gamma, None if site.beta is None else _wide(arrays[site.beta]))


def _config_beside(checkpoint: Checkpoint) -> tuple[Config | None, list[str]]:
    path = join(checkpoint.folder, "config.json")
    data = read_small(path)
    if data is None:
        return None, []
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return None, [f"{without_secrets(path)}: not a JSON object; ignored"]
    return make_config(fields), []


def _wide(array: npt.NDArray[np.generic]) -> Float64:
    wide = np.empty(array.shape)
    widen_into(array, wide)
    return wide


def _listed(names: list[str]) -> str:
    shown_names = ", ".join(names[:LISTED])
    return shown_names if len(names) <= LISTED else f"{shown_names} and {len(names) - LISTED} more"
