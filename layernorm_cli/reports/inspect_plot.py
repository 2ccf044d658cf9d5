"""Pictures of a checkpoint's norms: gamma and beta over depth, and gamma by site and feature."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoints.statistics import outliers
from ..errors import UsageError
from ..results import InspectResult, SiteInfo
from .pictures import STYLE, file_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_norms"]

Float64 = npt.NDArray[np.float64]
WIDTH = 11.0  # inches
LABELS = 40  # of sites beside the heat map, at most
COLUMNS = 2048  # of the heat map, at most: more features than that are drawn in groups
EDGE = 0.5  # percent of the values beyond each end of the heat map's colours
FIRST = ("on the embeddings", "before the layers", "on the features")  # roles ahead of all layers


class _Series(NamedTuple):
    """The sites of one name but for the layer's number; depths are their layers."""

    name: str
    depths: list[int]
    values: list[Float64]


def plot_norms(result: InspectResult, path: str) -> bytes:
    """Return a picture of the norms of a checkpoint as the bytes of a .png or .svg file, as path ends.

    The result's values must be there. Raises UsageError where there is nothing to draw.
    """
    if not result.values:
        raise UsageError(path, "no norms to draw", "a checkpoint with some")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    gammas = [values[0].reshape(-1) + site.gamma_offset for site, values in _pairs(result)]
    betas = [(site, values[1].reshape(-1)) for site, values in _pairs(result) if values[1] is not None]
    panels = 3 if betas else 2
    heat = 1.2 + 0.16 * min(max(len(gammas), 12), LABELS)
    legend = 0.22 * -(-len(_series(result.sites, gammas)) // 2)
    heights = [3.0] * (panels - 1) + [heat]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + legend + 0.8), layout="constrained")
        axes = figure.subplots(panels, 1, gridspec_kw={"height_ratios": heights})
        offset = " (its offset added)" if any(site.gamma_offset for site in result.sites) else ""
        _over_depth(axes[0], f"gamma{offset}", _series(result.sites, gammas))
        if betas:
            _over_depth(
                axes[1], "beta", _series([site for site, _ in betas], [beta for _, beta in betas])
            )
        _heat_map(figure, axes[-1], *_by_series(result.sites, gammas))
        figure.suptitle(result.checkpoint)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
        return file_bytes(figure, path)


def _pairs(result: InspectResult) -> list[tuple[SiteInfo, tuple[Float64, Float64 | None]]]:
    return list(zip(result.sites, result.values, strict=True))


def _series(sites: Sequence[SiteInfo], values: Sequence[Float64]) -> list[_Series]:
    """Group sites that differ in the layer's number only; others stand before or behind all layers."""
    layers = [_layer(site.site) for site in sites]
    last = max((layer for layer in layers if layer is not None), default=-1)
    grouped: dict[str, _Series] = {}
    for site, layer, value in zip(sites, layers, values, strict=True):
        name = _series_name(site.site)
        series = grouped.setdefault(name, _Series(name, [], []))
        end = -1 if site.role in FIRST else last + 1
        series.depths.append(end if layer is None else layer)
        series.values.append(value)
    return list(grouped.values())


def _by_series(sites: Sequence[SiteInfo], values: Sequence[Float64]) -> tuple[list[str], list[Float64]]:
    """Names and values of the sites, those of one series together: they are alike, and as wide."""
    names: dict[str, list[tuple[str, Float64]]] = {}
    for site, value in zip(sites, values, strict=True):
        names.setdefault(_series_name(site.site), []).append((site.site, value))
    ordered = [pair for pairs in names.values() for pair in pairs]
    return [name for name, _ in ordered], [value for _, value in ordered]


def _series_name(site: str) -> str:
    return site if _layer(site) is None else re.sub(r"\d+", "*", site, count=1)


def _layer(site: str) -> int | None:
    match = re.search(r"(?:^|[./_])(\d+)[./]", site)
    return None if match is None else int(match[1])


def _over_depth(axis: Axes, title: str, series: Sequence[_Series]) -> None:
    """Median, quartiles and extremes of each series over the layers, outlier features as dots."""
    from matplotlib.ticker import MaxNLocator

    shift = 0.6 / max(len(series), 1)
    for number, (name, depths, values) in enumerate(series):
        places = np.array(depths) + shift * (number - (len(series) - 1) / 2)
        with np.errstate(all="ignore"):
            least, low, median, high, greatest = np.array(
                [
                    np.nanpercentile(v, [0, 25, 50, 75, 100]) if np.isfinite(v).any() else [np.nan] * 5
                    for v in values
                ]
            ).T
        colour = f"C{number % 10}"
        axis.plot(places, median, "o-" if number < 10 else "s--", color=colour, ms=3, lw=1, label=name)
        axis.vlines(places, least, greatest, color=colour, lw=0.6, alpha=0.7)
        axis.vlines(places, low, high, color=colour, lw=3, alpha=0.45)
        for place, value in zip(places, values, strict=True):
            far = value[outliers(value)]
            if far.size:
                axis.plot(np.full(far.size, place), far, "x", color=colour, ms=5, mew=1)
    axis.set_title(
        f"{title}: median, quartiles (thick), extremes (thin), outlier features (x)", fontsize=10
    )
    axis.set_xlabel("layer (norms outside the layers: before the first, behind the last)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axis.grid(alpha=0.25, lw=0.5)
    axis.margins(x=0.02)


def _heat_map(figure: Figure, axis: Axes, names: Sequence[str], gammas: Sequence[Float64]) -> None:
    width = max(gamma.size for gamma in gammas)
    columns = min(width, COLUMNS)
    picture = np.full((len(gammas), columns), np.nan)
    for row, gamma in enumerate(gammas):
        groups = _grouped(gamma, max(1, round(gamma.size * columns / width)))
        picture[row, : groups.size] = groups
    finite = picture[np.isfinite(picture)]
    low, high = np.percentile(finite, [EDGE, 100 - EDGE]) if finite.size else (0.0, 1.0)
    image = axis.imshow(
        picture,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=low,
        vmax=high if high > low else low + 1e-12,
        extent=(-0.5, width - 0.5, len(gammas) - 0.5, -0.5),
    )
    every = -(-len(names) // LABELS)
    axis.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    axis.set_xlabel("feature")
    grouped = (
        "" if width <= COLUMNS else f", each column the farthest of about {width / COLUMNS:.3g} features"
    )
    axis.set_title(f"gamma by site and feature{grouped}", fontsize=10)
    figure.colorbar(image, ax=axis, extend="both", pad=0.01, fraction=0.03)


def _grouped(gamma: Float64, columns: int) -> Float64:
    """At most so many values: of each group of features the one farthest from the median of all."""
    if gamma.size <= columns:
        return gamma
    middle = np.median(gamma)
    groups = np.array_split(gamma, columns)
    return np.array([group[np.abs(group - middle).argmax()] for group in groups])
