"""Judge what a norm has learned by its gamma and beta."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..results import ParameterStats
from .sites import Site
from .survey import Parameters

__all__ = ["OUTLIER", "outliers", "stats_of", "verdict_of"]

Float64 = npt.NDArray[np.float64]
OUTLIER = 6.0  # standard deviations from the mean over the features


def stats_of(values: Float64) -> ParameterStats:
    """Return the statistics of a gamma or beta over its features; std is the population's."""
    flat = values.reshape(-1)
    with np.errstate(all="ignore"):
        mean = flat.mean()
        std = np.sqrt(np.square(flat - mean).mean())
        least, greatest = flat.min(), flat.max()
        far = max(greatest - mean, mean - least) > OUTLIER * std
        norm = np.sqrt(np.square(flat).sum())
    found = tuple(outliers(flat).tolist()) if far else ()
    return ParameterStats(float(mean), float(std), float(least), float(greatest), float(norm), found)


def outliers(values: Float64) -> npt.NDArray[np.intp]:
    """Return which features lie more than six standard deviations from the mean of all."""
    with np.errstate(all="ignore"):
        return np.flatnonzero(np.abs(values - values.mean()) > OUTLIER * values.std())


def verdict_of(site: Site, parameters: Parameters) -> str:
    """Return nonfinite, zero, identity, constant or trained.

    identity: gamma (its offset added) is 1 and beta 0, as when the model was made. constant: one value
    for all features. zero: the norm's output does not depend on its input.
    """
    gamma, beta = parameters.gamma + site.gamma_offset, parameters.beta
    if not (np.isfinite(gamma).all() and (beta is None or np.isfinite(beta).all())):
        return "nonfinite"
    first = gamma.flat[0]
    if not (gamma == first).all():
        return "trained"
    if first == 0:
        return "zero"
    if first == 1 and (beta is None or not beta.any()):
        return "identity"
    return "constant" if beta is None or (beta == beta.flat[0]).all() else "trained"
