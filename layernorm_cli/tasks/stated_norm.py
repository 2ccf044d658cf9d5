"""The norm that a user states: by options, or as a site of a checkpoint; shared by the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..errors import UsageError
from ..norm.dtypes import DType
from ..norm.spec import DEFAULT_EPS, Norm, check_eps, make_norm
from ..tensorfiles.reader import open_tensor
from ..tensorfiles.refs import without_secrets

if TYPE_CHECKING:
    from ..checkpoints.sites import Site
    from ..checkpoints.survey import Parameters, Survey

__all__ = [
    "NormOptions",
    "ReadNorm",
    "StatedNorm",
    "check_norm",
    "metadata_of",
    "norm_of_site",
    "norm_over",
    "read_norm",
    "state_norm",
]


class NormOptions(Protocol):
    """The options of a command that say which norm; None where the user did not say."""

    @property
    def gamma(self) -> str | None: ...
    @property
    def beta(self) -> str | None: ...
    @property
    def params(self) -> str | None: ...
    @property
    def site(self) -> str | None: ...
    @property
    def eps(self) -> float | None: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def gamma_offset(self) -> float | None: ...
    @property
    def assume_dtype(self) -> DType | None: ...


class StatedNorm(NamedTuple):
    """A norm, and where it is from: eps_source, the refs of gamma and beta, the offset in gamma."""

    norm: Norm
    eps_source: str
    gamma: str | None
    beta: str | None
    gamma_offset: float


class ReadNorm(NamedTuple):
    """What options say of a norm, with its parameters read, whatever the shape they are for."""

    options: NormOptions
    gamma: npt.NDArray[np.generic] | None = None
    beta: npt.NDArray[np.generic] | None = None
    of_site: tuple[Site, Parameters] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameters; () if there are none, and any shape will do."""
        given = (self.of_site and self.of_site[1].gamma, self.gamma, self.beta)
        return next((values.shape for values in given if values is not None), ())


def check_norm(options: NormOptions) -> None:
    """Find what cannot be before anything is read; Raises UsageError."""
    if options.eps is not None:
        check_eps(options.eps)
    if options.site is not None and options.params is None:
        raise UsageError("--site", "there is no checkpoint that it is in", "--params CKPT too")
    for name, value in (("--gamma", options.gamma), ("--beta", options.beta)):
        if options.params is not None and value is not None:
            raise UsageError(name, "--params has it already", f"--params or {name}")
    if options.gamma_offset and options.gamma is None and options.params is None:
        raise UsageError("--gamma-offset", "there is no gamma to add it to", "--gamma REF too")


def state_norm(options: NormOptions, shape: tuple[int, ...]) -> StatedNorm:
    """Read the parameters of the norm over features of this shape; see DEFAULT_EPS for its eps.

    Raises UsageError where the parameters have another shape, or the kind of a site is not known;
    InputError and its FormatError where they cannot be read.
    """
    return norm_over(read_norm(options, shape), shape)


def read_norm(options: NormOptions, shape: tuple[int, ...] | None = None) -> ReadNorm:
    """Read the parameters of a norm; Raises as state_norm, for the shape only where that is known."""
    if options.params is not None:
        from ..checkpoints.survey import (
            read_parameters,
            survey,
        )  # runs without a checkpoint start faster

        found = survey(options.params)
        ((site, parameters),) = read_parameters(found, [_site(found, options.site)])
        return ReadNorm(options, of_site=(site, parameters))
    gamma = _parameter("gamma", options.gamma, shape, options.assume_dtype)
    beta = _parameter("beta", options.beta, shape, options.assume_dtype)
    return ReadNorm(options, gamma, beta)


def norm_over(read: ReadNorm, shape: tuple[int, ...]) -> StatedNorm:
    """Return the norm over features of this shape; Raises UsageError where its parameters differ."""
    options, gamma, beta = read.options, read.gamma, read.beta
    if read.of_site is not None:
        return norm_of_site(options, *read.of_site, shape)
    for name, ref, values in (("gamma", options.gamma, gamma), ("beta", options.beta, beta)):
        if values is not None:
            _check_shape(name, ref or "", values.shape, shape)
    offset = options.gamma_offset or 0
    eps = DEFAULT_EPS if options.eps is None else options.eps
    return StatedNorm(
        make_norm(options.kind or "layer", eps, gamma, beta, offset, shape),
        "default" if options.eps is None else "--eps",
        options.gamma and without_secrets(options.gamma),
        options.beta and without_secrets(options.beta),
        offset,
    )


def norm_of_site(
    options: NormOptions, site: Site, parameters: Parameters, shape: tuple[int, ...]
) -> StatedNorm:
    """Return the norm of a site, less what options say otherwise of eps, kind and offset."""
    gamma = f"{without_secrets(site.file)}#{site.gamma}"
    beta = None if site.beta is None else f"{without_secrets(site.file)}#{site.beta}"
    kind = options.kind or site.kind
    if kind == "unknown":
        raise UsageError(
            site.site,
            "its kind is not known: a gain without bias, and no config.json that says it",
            "--kind layer or --kind rms",
        )
    _check_shape("gamma", gamma, parameters.gamma.shape, shape)
    offset = site.gamma_offset if options.gamma_offset is None else options.gamma_offset
    eps, source = DEFAULT_EPS, "default"
    if options.eps is not None:
        eps, source = options.eps, "--eps"
    elif site.eps is not None:
        eps, source = site.eps, site.eps_source or ""
    norm = make_norm(kind, eps, parameters.gamma, parameters.beta, offset, shape)
    return StatedNorm(norm, source, gamma, beta, offset)


def metadata_of(stated: StatedNorm) -> dict[str, str]:
    """Return what an output says of the norm that made it."""
    return {
        "tool": f"layernorm {__version__}",
        "kind": stated.norm.kind,
        "eps": repr(stated.norm.eps),
        "gamma_offset": str(stated.gamma_offset),
    }


def _site(found: Survey, name: str | None) -> Site:
    from ..checkpoints.survey import find_site

    if name is not None:
        return find_site(found, name)
    if len(found.sites) == 1:
        return found.sites[0]
    where = without_secrets(found.checkpoint.path)
    raise UsageError(
        where, f"{len(found.sites)} sites in it", "--site NAME", f"layernorm inspect {where}"
    )


def _parameter(
    name: str, ref: str | None, shape: tuple[int, ...] | None, assume: DType | None
) -> npt.NDArray[np.generic] | None:
    if ref is None:
        return None
    with open_tensor(ref, assume) as tensor:
        if shape is not None:
            _check_shape(name, tensor.ref, tensor.shape, shape)
        return tensor.read()


def _check_shape(name: str, ref: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        expected = f"shape {shape}, one value per normalized feature of x (nothing is broadcast)"
        raise UsageError(f"{name} {ref}", f"has shape {found}", expected)
