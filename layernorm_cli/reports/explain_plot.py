"""A picture of one row before and after its norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoints.statistics import outliers
from ..results import ExplainResult
from .pictures import STYLE, file_bytes
from .tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_row"]

Float64 = npt.NDArray[np.float64]
BARS = 128  # of more features than that there are dots, no bars
DRAWABLE = 1e30  # beyond it, and its inverse, values are drawn in units of a power of ten
WIDE = 100  # a band more than so many times as wide as the values would hide them
ALIKE = 1e-9  # values that differ by less than that against their size are one bar of the histogram


class _Series(NamedTuple):
    """The values of a panel, and what they are; a line at middle, a band so far on both its sides."""

    title: str
    values: Float64
    middle: float
    spread: float


def plot_row(result: ExplainResult, path: str) -> bytes:
    """Return a picture of the row's x, xhat and y as the bytes of a .png or .svg file, as path ends.

    Features that are NaN or inf are left out.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = result.steps
    learned = steps.gamma_values is not None or steps.beta_values is not None
    var = number(steps.eps_effect.var_ratio)
    std = f"std = sqrt({'var' if result.kind == 'layer' else 'mean square'} + eps)"
    mean = f"mean {number(steps.mean)}, " if result.kind == "layer" else ""
    middle = steps.mean if result.kind == "layer" else 0.0
    series = [
        _Series(f"before: x; {mean}{std} = {number(steps.std)} (grey)", steps.x, middle, steps.std),
        _Series(f"after: {'xhat' if learned else 'y'}; var {var}", steps.xhat, 0.0, 1.0),
    ]
    if learned:
        series.append(_Series("after gamma and beta: y", steps.y, 0.0, math.nan))
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 0.6 + 2.5 * len(series)), layout="constrained")
        grid = figure.subplots(len(series), 2, width_ratios=(5, 1), sharey="row", squeeze=False)
        for place, (axes, one) in enumerate(zip(grid, map(_drawable, series), strict=True)):
            _panel(axes[0], one, f"C{place}")
            _histogram(axes[1], one, f"C{place}")
        grid[-1, 0].set_xlabel("feature")
        grid[-1, 1].set_xlabel("features")
        row = ", ".join(map(str, steps.row))
        tensor = f" ({result.tensor})" if result.tensor else ""
        figure.suptitle(f"{result.input}{tensor}{', row ' if row else ''}{row}, eps {steps.eps:g}")
        return file_bytes(figure, path)


def _drawable(series: _Series) -> _Series:
    """The finite values, others NaN, in units that can be drawn."""
    title, values, middle, spread = series
    finite = np.where(np.isfinite(values), values, np.nan)
    largest = float(np.abs(finite[~np.isnan(finite)]).max(initial=0))
    missing = np.count_nonzero(np.isnan(finite))
    if missing:
        title += f"; {missing} NaN or inf not drawn"
    if largest == 0 or 1 / DRAWABLE < largest < DRAWABLE:
        return _Series(title, finite, middle, spread)
    power = math.floor(math.log10(largest))
    step = 10.0 ** (power // 2), 10.0 ** (power - power // 2)  # 10.0 ** power itself may vanish
    title += f"; in units of 1e{power:+d}"
    return _Series(
        title, finite / step[0] / step[1], middle / step[0] / step[1], spread / step[0] / step[1]
    )


def _panel(axis: Axes, series: _Series, colour: str) -> None:
    """The values by feature."""
    from matplotlib.ticker import MaxNLocator

    title, values, middle, _ = series
    places = np.arange(values.size)
    if values.size <= BARS:
        foot = middle if math.isfinite(middle) else 0.0
        axis.bar(places, values - foot, 0.8, foot, color=colour, alpha=0.8)
    else:
        axis.plot(places, values, ".", color=colour, ms=max(1.5, 4 - values.size / 1000), alpha=0.8)
        far = outliers(values)
        axis.plot(far, values[far], "x", color=colour, ms=6, mew=1.2)
    _marks(axis, series)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlim(-0.6 - values.size / 200, values.size - 0.4 + values.size / 200)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axis.grid(alpha=0.25, lw=0.5)


def _histogram(axis: Axes, series: _Series, colour: str) -> None:
    """How many features lie where, beside the panel."""
    from matplotlib.ticker import MaxNLocator

    finite = series.values[~np.isnan(series.values)]
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        bins = min(max(4, finite.size // 12), 48)
        if high - low <= ALIKE * max(abs(low), abs(high)):
            margin = 0.05 * abs(high) or 0.5
            bins, low, high = 1, low - margin, high + margin
        axis.hist(
            finite, bins=bins, range=(low, high), orientation="horizontal", color=colour, alpha=0.6
        )
    _marks(axis, series)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    axis.tick_params(labelleft=False)
    axis.grid(alpha=0.25, lw=0.5)


def _marks(axis: Axes, series: _Series) -> None:
    middle = series.middle if math.isfinite(series.middle) else 0.0
    axis.axhline(middle, color="0.3", lw=0.8)
    finite = series.values[~np.isnan(series.values)]
    if series.spread < WIDE * (np.abs(finite - middle).max(initial=0) or math.inf):
        axis.axhspan(middle - series.spread, middle + series.spread, color="0.5", alpha=0.15, lw=0)
