"""How far y is from the norm of x: the largest errors, and the rows and features that they are in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .closeness import Closeness, ulp
from .dtypes import DTYPES, DType
from .forward import Kernel, RowStats
from .row_pairs import Block, total
from .spec import Norm
from .variants import round_to

__all__ = ["Deviation", "deviation", "distance", "merged", "no_deviation"]

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

WORST = 5
HOPELESS = 0.1  # a tolerance of more standard deviations than this
MOST = 0.5  # and more than this is no tolerance


class Deviation(NamedTuple):
    """The errors of some rows of y.

    max_abs is from the unrounded result, max_ulp from the correctly rounded one, which exact elements
    are. wrong elements are out of the tolerance, beyond those out of what engines reach. squares is the
    sum of (error / epsilon of its terms)^2. In hopeless rows the mean is so large that engines of this
    dtype have no digits left. worst holds (is it wrong, error, row), flattest (var, row).
    """

    elements: int
    max_abs: float
    max_ulp: float
    exact: int
    wrong: int
    wrong_rows: int
    beyond: int
    nonfinite_rows: int
    hopeless_rows: int
    squares: float
    features: Float64
    worst: tuple[tuple[bool, float, int], ...]
    flattest: tuple[tuple[float, int], ...]


def no_deviation(width: int) -> Deviation:
    """Return the deviation of no rows."""
    return Deviation(0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0.0, np.zeros(width), (), ())


def merged(one: Deviation, other: Deviation) -> Deviation:
    """Return the deviation of one's rows and other's."""
    return Deviation(
        one.elements + other.elements,
        max(one.max_abs, other.max_abs),
        max(one.max_ulp, other.max_ulp),
        one.exact + other.exact,
        one.wrong + other.wrong,
        one.wrong_rows + other.wrong_rows,
        one.beyond + other.beyond,
        one.nonfinite_rows + other.nonfinite_rows,
        one.hopeless_rows + other.hopeless_rows,
        one.squares + other.squares,
        np.maximum(one.features, other.features),
        tuple(sorted(one.worst + other.worst, key=lambda row: (not row[0], -row[1], row[2]))[:WORST]),
        tuple(sorted(one.flattest + other.flattest)[:WORST]),
    )


def distance(y: Float64, truth: Float64, dtype: DType) -> Float64:
    """Return abs(y - truth): 0 where both are NaN, or overflow in the same way, inf where one is NaN."""
    off = np.abs(y - truth)
    odd = ~np.isfinite(off)
    if odd.any():
        found, expected = y[odd], _rounded(truth[odd], dtype)
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        off[odd] = np.where(same, 0.0, np.inf)
    return off


def deviation(block: Block, kernel: Kernel, norm: Norm, y_dtype: DType, close: Closeness) -> Deviation:
    """Measure a block of at least one row; kernel is the row kernel of the norm."""
    truth = np.empty(block.y.shape)
    stats = kernel(total(block), truth)
    with np.errstate(all="ignore"):
        return _measure(block, truth, stats, norm, y_dtype, close)


def _measure(
    block: Block, truth: Float64, stats: RowStats, norm: Norm, y_dtype: DType, close: Closeness
) -> Deviation:
    y = block.y
    rounded = _rounded(truth, y_dtype)
    inexact = np.not_equal(y, rounded) & ~(np.isnan(y) & np.isnan(rounded))
    off = distance(y, truth, y_dtype)
    if norm.kind == "rms" and stats.nonfinite.any():
        off[_divided_by_inf(block, norm, close)] = 0
    share = (norm.eps * stats.rstd * stats.rstd)[:, None]
    scaled = np.abs(truth if norm.beta is None else truth - norm.beta)
    terms = _terms(scaled, stats, share, norm, close)
    only_the_same = ~np.isfinite(rounded)

    def is_wrong(tolerance: Float64) -> Bool:
        right: Bool = off <= np.where(only_the_same, 0, tolerance)
        return ~right

    wrong = is_wrong(close.bound(truth, terms, share * scaled))
    beyond = is_wrong(close.default(terms, share * scaled)) if close.given else wrong
    units = close.units(off, terms)
    nearest = rounded[inexact]
    ulps = np.abs(y[inexact] - nearest) / ulp(nearest, _float(y_dtype))
    row_error, row_wrong = off.max(axis=1), np.asarray(wrong.any(axis=1))
    spread = np.where(stats.var > 0, stats.var, np.inf)
    hopeless = close.default_rtol * np.abs(stats.mean) * stats.rstd > HOPELESS
    worst = np.lexsort((-row_error, ~row_wrong))[:WORST]
    flattest = [at for at in np.argsort(spread, kind="stable")[:WORST] if np.isfinite(spread[at])]
    numbers = block.numbers
    return Deviation(
        elements=y.size,
        max_abs=float(off.max()),
        max_ulp=float(np.nan_to_num(ulps, nan=np.inf, posinf=np.inf).max(initial=0)),
        exact=y.size - int(np.count_nonzero(inexact)),
        wrong=int(np.count_nonzero(wrong)),
        wrong_rows=int(np.count_nonzero(row_wrong)),
        beyond=int(np.count_nonzero(beyond)),
        nonfinite_rows=int(np.count_nonzero(stats.nonfinite)),
        hopeless_rows=int(np.count_nonzero(hopeless)) if norm.kind == "layer" else 0,
        squares=float(np.square(units[np.isfinite(units)]).sum()),
        features=off.max(axis=0),
        worst=tuple((bool(row_wrong[at]), float(row_error[at]), int(numbers[at])) for at in worst),
        flattest=tuple((float(spread[at]), int(numbers[at])) for at in flattest),
    )


def _terms(
    scaled: Float64, stats: RowStats, eps_share: Float64, norm: Norm, close: Closeness
) -> Float64:
    """The sum of the sizes of what each element is made of; see closeness.py."""
    terms = scaled
    if norm.kind == "layer":
        of_mean = (np.abs(stats.mean) * stats.rstd)[:, None]
        size = of_mean + np.sqrt(np.maximum(1 - eps_share, 0))  # which is sd * rstd
        size = np.minimum(size, MOST / close.default_rtol)
        terms = terms + (size if norm.gamma is None else size * np.abs(norm.gamma))
    if norm.beta is not None:
        terms = terms + np.abs(norm.beta)
    return terms


def _divided_by_inf(block: Block, norm: Norm, close: Closeness) -> Bool:
    """Where engines leave beta in the row of an inf, as x / inf is 0, while ours makes all of it NaN."""
    x, beta = total(block), 0.0 if norm.beta is None else norm.beta
    has_inf = np.isinf(x).any(axis=1, keepdims=True) & ~np.isnan(x).any(axis=1, keepdims=True)
    excused: Bool = has_inf & np.isfinite(x) & (np.abs(block.y - beta) <= 2 * close.unit * np.abs(beta))
    return excused


def _float(dtype: DType) -> DType:
    return dtype if dtype.kind == "f" else DTYPES["float64"]


def _rounded(truth: Float64, dtype: DType) -> Float64:
    return round_to(truth, dtype) if dtype.kind == "f" else truth
