"""Known mistakes and variants of a layer norm: each a small change of the recipe, in one table.

A recipe says how y is made of x, step by step. A variant changes one step or two, so that two
variants which change different steps make a pair. What a recipe makes is computed in float64.

Where statistics were computed in fewer digits, nobody can say in which order they were added up.
They are therefore taken from y itself by least squares, and must then lie where those digits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .closeness import epsilon, ulp
from .dtypes import DTYPES, DType, numpy_dtype
from .rounding import round_into

__all__ = [
    "KNOWN_EPS",
    "VARIANTS",
    "Prediction",
    "Recipe",
    "Rows",
    "Stated",
    "Variant",
    "changed",
    "named",
    "pairs",
    "predict",
    "round_to",
    "stated_recipe",
]

Float64 = npt.NDArray[np.float64]

KNOWN_EPS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
PER_TERM = 1 / 256  # how the error of a sum grows with its length; see closeness.py
INFERRED = -1.0  # an eps that is to be found from the rows
SHORT_SUMS = ("float16", "bfloat16", "float32")
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}


class Recipe(NamedTuple):
    """How y is made: the steps in the order in which they are done.

    source: x, or the sum of x and the residual. over: what is normalized together: rows, or columns
    over all rows or over the first axis only, or all. digits: the dtype of the statistics, or squares
    for E[x^2] - E[x]^2 in float32. root: eps inside or outside it, or none for no scaling. parameters:
    the dtype that gamma and beta were rounded to. added: what is added to the result. output: the
    dtype, coarser than Y's own, that it was rounded to. computed: the dtype that every step was in.
    """

    source: str = "sum"
    over: str = "rows"
    centred: bool = True
    digits: str = "float64"
    unbiased: bool = False
    root: str = "inside"
    eps: float = 1e-5
    gamma: str = "stated"
    beta: str = "stated"
    beta_first: bool = False
    parameters: str = "float64"
    added: str = "none"
    output: str = "own"
    computed: str = "exactly"


class Stated(NamedTuple):
    """The norm that y should be: gamma (d,) without its offset and beta (d,), float64, or None."""

    kind: str
    eps: float
    gamma: Float64 | None
    beta: Float64 | None
    offset: float
    has_residual: bool
    y: DType


class Rows(NamedTuple):
    """Some rows: x and y (n, d) float64, the residual or None.

    columns has mean, var and count of (source, over), for statistics that are not a row's own.
    """

    x: Float64
    residual: Float64 | None
    y: Float64
    columns: Mapping[tuple[str, str], tuple[Float64, Float64, int]]


class Prediction(NamedTuple):
    """What a recipe makes: y (n, d), the sum of the sizes of each element's terms, the eps it used.

    eps_sd is the standard deviation of an inferred eps.
    """

    y: Float64
    terms: Float64
    eps: float
    eps_sd: float


def _always(stated: Stated) -> bool:
    return True


def _has_gamma(stated: Stated) -> bool:
    return stated.gamma is not None


def _has_beta(stated: Stated) -> bool:
    return stated.beta is not None


def _has_both(stated: Stated) -> bool:
    return stated.gamma is not None and stated.beta is not None


def _is_layer(stated: Stated) -> bool:
    return stated.kind == "layer"


def _is_rms(stated: Stated) -> bool:
    return stated.kind == "rms"


def _has_residual(stated: Stated) -> bool:
    return stated.has_residual


def _finer_than(name: str) -> Callable[[Stated], bool]:
    """Whether y could hold more digits than this dtype has."""

    def finer(stated: Stated) -> bool:
        return stated.y.kind == "f" and epsilon(stated.y) < epsilon(DTYPES[name])

    return finer


class Variant(NamedTuple):
    """What was done in words, the steps that it changes, and which norms it can happen to."""

    name: str
    change: Mapping[str, Any]
    when: Callable[[Stated], bool] = _always


VARIANTS = (
    Variant("gamma left out", {"gamma": "none"}, _has_gamma),
    Variant("beta left out", {"beta": "none"}, _has_beta),
    Variant("gamma and beta left out", {"gamma": "none", "beta": "none"}, _has_both),
    Variant("beta added before gamma", {"beta_first": True}, _has_both),
    Variant(
        "gamma + 1 (an offset that was not stated)",
        {"gamma": "plus one"},
        lambda stated: stated.gamma is not None and not stated.offset,
    ),
    Variant(
        "the offset of gamma forgotten",
        {"gamma": "stored"},
        lambda stated: stated.gamma is not None and bool(stated.offset),
    ),
    Variant("gamma and beta rounded to bfloat16", {"parameters": "bfloat16"}, _has_gamma),
    Variant("gamma and beta rounded to float16", {"parameters": "float16"}, _has_gamma),
    Variant("gamma and beta swapped", {"gamma": "beta", "beta": "gamma"}, _has_both),
    Variant("unbiased variance (d - 1)", {"unbiased": True}),
    Variant("eps outside the root (std + eps)", {"root": "outside"}),
    Variant(
        "eps outside the root, unbiased variance (d - 1)",
        {"root": "outside", "unbiased": True},
    ),
    Variant("eps missing", {"eps": 0.0}),
    *(Variant(f"eps {eps:g}", {"eps": eps}) for eps in KNOWN_EPS),
    Variant("RMS norm (mean not removed)", {"centred": False}, _is_layer),
    Variant("layer norm (mean removed)", {"centred": True}, _is_rms),
    Variant("mean removed, but not scaled", {"centred": True, "root": "none"}),
    Variant("not normalized", {"centred": False, "root": "none"}),
    Variant(
        "not normalized, gamma and beta left out",
        {"centred": False, "root": "none", "gamma": "none", "beta": "none"},
        _has_both,
    ),
    Variant("residual left out", {"source": "x"}, _has_residual),
    Variant(
        "residual added after the norm, not before it",
        {"source": "x", "added": "residual"},
        _has_residual,
    ),
    Variant("pre-norm: x + LN(x)", {"source": "x", "added": "x"}),
    Variant("sum added after the norm once more", {"added": "sum"}, _has_residual),
    Variant("normalized over axis 0 (batch norm)", {"over": "columns"}),
    Variant("normalized over axis 0 alone", {"over": "first axis"}),
    Variant("normalized over all axes", {"over": "all"}),
    Variant("output rounded to bfloat16", {"output": "bfloat16"}, _finer_than("bfloat16")),
    Variant("output rounded to float16", {"output": "float16"}, _finer_than("float16")),
    Variant("output rounded to float32", {"output": "float32"}, _finer_than("float32")),
    Variant("output cast to integers", {"output": "integers"}, lambda stated: stated.y.kind != "f"),
    Variant("another eps", {"eps": INFERRED}),
    Variant("statistics in bfloat16", {"digits": "bfloat16"}),
    Variant("statistics in float16", {"digits": "float16"}),
    Variant("statistics in float32", {"digits": "float32"}),
    Variant("E[x^2] - E[x]^2 in float32", {"digits": "squares"}, _is_layer),
)
"""Simple ones first: of variants that explain the same, the first is named."""

COMPUTED = tuple(
    Variant(f"computed in {name}", {"output": name, "computed": name}, _finer_than(name))
    for name in ("float32", "float16", "bfloat16")
)
"""The least that can be said, tried where nothing else explains y."""


def stated_recipe(stated: Stated) -> Recipe:
    """Return the recipe of the norm as it is stated."""
    return Recipe(centred=stated.kind == "layer", eps=stated.eps)


def changed(recipe: Recipe, variant: Variant) -> Recipe:
    """Return the recipe with the variant's changes."""
    return recipe._replace(**variant.change)


def named(variant: Variant, recipe: Recipe, eps: float) -> str:
    """Return what a variant of this recipe did, with the eps that it used, in words."""
    if "eps" in variant.change and eps != 0:
        return f"eps {eps:.6g} instead of {recipe.eps:g}"
    return variant.name


def pairs(variants: list[Variant]) -> Iterator[tuple[Variant, Variant]]:
    """Yield each two that change different steps."""
    for index, one in enumerate(variants):
        for other in variants[index + 1 :]:
            if not set(one.change) & set(other.change):
                yield one, other


def predict(recipe: Recipe, rows: Rows, stated: Stated, unit: float) -> Prediction:
    """Return what a recipe makes of the rows; unit is the relative rounding error of rows.y.

    rows.y is looked at only where an eps or statistics are to be found from it.
    """
    with np.errstate(all="ignore"):
        return _predict(recipe, rows, stated, unit)


def _predict(recipe: Recipe, rows: Rows, stated: Stated, unit: float) -> Prediction:
    total = rows.x if rows.residual is None else rows.x + rows.residual
    x = rows.x if recipe.source == "x" else total
    gamma, beta = _parameters(recipe, stated, x.shape[1])
    added = {"none": None, "x": rows.x, "residual": rows.residual, "sum": total}[recipe.added]
    base = beta if added is None else beta + added
    mean, var = _statistics(recipe, rows, x)
    centred = x - mean
    if recipe.over == "rows" and recipe.centred:
        centred -= centred.mean(axis=1, keepdims=True)
    eps, eps_sd = recipe.eps, 0.0
    if eps == INFERRED:
        eps, eps_sd = _inferred_eps(recipe, centred, mean, var, gamma, rows.y - base, unit)
    if recipe.digits == "float64":
        scale = _scale(recipe.root, var, eps)
    elif recipe.digits == "squares":
        scale = _scale_of_squares(recipe, centred, mean, var, eps, gamma, rows.y - base)
    else:
        mean, scale = _short_statistics(recipe, x, mean, var, eps, gamma, rows.y - base, unit)
        centred = x - mean
    standard = centred * scale
    y = standard * gamma + base
    size = np.abs(standard)
    if recipe.centred:
        size = size + (np.abs(mean) + np.sqrt(var)) * np.where(np.isfinite(scale), scale, 0)
    if recipe.over != "rows":
        size = size * (1 + rows.columns[recipe.source, recipe.over][2] * PER_TERM)
    terms = size * np.abs(gamma) + np.abs(beta)
    if added is not None:
        terms = terms + np.abs(added)
    return Prediction(y, terms, eps, eps_sd)


def _parameters(recipe: Recipe, stated: Stated, width: int) -> tuple[Float64, Float64]:
    """The gain and the bias, each (d,), of y = gain * xhat + bias."""
    ones, zeros = np.ones(width), np.zeros(width)
    gamma = ones if stated.gamma is None else stated.gamma
    beta = zeros if stated.beta is None else stated.beta
    if recipe.parameters != "float64":
        gamma, beta = (round_to(values, DTYPES[recipe.parameters]) for values in (gamma, beta))
    gain = {
        "stated": gamma + (stated.offset if stated.gamma is not None else 0),
        "stored": gamma,
        "plus one": gamma + 1,
        "none": ones,
        "beta": beta,
    }[recipe.gamma]
    bias = {"stated": beta, "none": zeros, "gamma": gamma}[recipe.beta]
    return gain, bias * gain if recipe.beta_first else bias


def _statistics(recipe: Recipe, rows: Rows, x: Float64) -> tuple[Float64, Float64]:
    """mean and var, or 0 and the mean square, in a shape that goes with x (n, d)."""
    if recipe.over == "rows":
        mean = x.mean(axis=1, keepdims=True)
        centred = x - mean
        residual = centred.mean(axis=1, keepdims=True)
        centred -= residual
        mean = mean + residual
        var = np.square(centred).mean(axis=1, keepdims=True)
        count = x.shape[1]
    else:
        mean, var, count = rows.columns[recipe.source, recipe.over]
    if not recipe.centred:
        mean, var = np.zeros(1), var + mean * mean
    if recipe.unbiased:
        var = var * np.float64(count) / np.float64(count - 1)
    return mean, var


def _scale(root: str, var: Float64, eps: float) -> Float64:
    if root == "none":
        return np.ones(1)
    return 1 / np.sqrt(var + eps) if root == "inside" else 1 / (np.sqrt(var) + eps)


def _sum(values: Float64) -> Float64:
    total: Float64 = values.sum(axis=1, keepdims=True)
    return total


def _inferred_eps(
    recipe: Recipe,
    centred: Float64,
    mean: Float64,
    var: Float64,
    gamma: Float64,
    target: Float64,
    unit: float,
) -> tuple[float, float]:
    """eps by least squares: each row's scale, then eps from all rows, each by its own uncertainty.

    A row tells eps to about unit * (var + eps), so that rows of small var tell it best.
    """
    if recipe.over != "rows" or recipe.root == "none" or recipe.digits != "float64":
        return np.nan, np.nan
    column = centred * gamma
    squares = _sum(column * column)
    scale = _sum(column * target) / squares
    noise = np.sqrt(_sum(np.square(target - scale * column)) / max(1, centred.shape[1] - 1) / squares)
    relative = noise / scale
    floor = unit * (0.5 + np.abs(mean) * scale)
    spread = np.sqrt(relative * relative + floor * floor)
    if recipe.root == "inside":
        found, sd = 1 / (scale * scale) - var, 2 * spread / (scale * scale)
    else:
        found, sd = 1 / scale - np.sqrt(var), spread / scale
    use = np.isfinite(found) & np.isfinite(sd) & (sd > 0) & (scale > 0) & (var > 0)
    if not use.any():
        return np.nan, np.nan
    found, weights = found[use], 1 / np.square(sd[use])
    eps = float((found * weights).sum() / weights.sum())
    least = float((sd[use]).min())
    return max(eps, 0.0), max(float(1 / np.sqrt(weights.sum())), 0.25 * least)


def _short_statistics(
    recipe: Recipe,
    x: Float64,
    mean: Float64,
    var: Float64,
    eps: float,
    gamma: Float64,
    target: Float64,
    unit: float,
) -> tuple[Float64, Float64]:
    """mean and scale (n, 1) as y has them, moved to the nearest that are numbers of the dtype.

    Where y has no more digits than that dtype, only its overflow can be seen.
    """
    dtype = DTYPES[recipe.digits]
    visible = unit < epsilon(dtype) / 8
    if recipe.over != "rows" or recipe.root == "none":
        return mean, np.full((len(x), 1), np.nan)
    scale = np.broadcast_to(_scale(recipe.root, var, eps), (len(x), 1))
    if recipe.centred and visible:
        column = gamma * (x - mean)
        cc, cg, gg = _sum(column * column), _sum(column * gamma), gamma @ gamma
        ct, gt = _sum(column * target), _sum(gamma * target)
        fitted = (ct * gg - gt * cg) / (cc * gg - cg * cg)
        moved = mean - (cc * gt - cg * ct) / (cc * gg - cg * cg) / fitted
        mean = np.where(np.isfinite(moved), round_to(moved, dtype), mean)
    column = gamma * (x - mean)
    fitted = _sum(column * target) / _sum(column * column)
    short_eps = float(round_to(np.array([eps]), dtype)[0])
    candidates = (
        round_to(fitted, dtype),
        1 / round_to(1 / fitted, dtype),
        *(
            1 / np.sqrt(round_to(1 / (fitted * fitted) - each, dtype) + each)
            for each in (0.0, eps, short_eps)
        ),
    )
    errors = [np.nansum(np.square(target - each * column)) for each in candidates]
    best = candidates[int(np.argmin(errors))]
    about_mean = var + np.square(mean - x.mean(axis=1, keepdims=True)) * recipe.centred
    ratio = best / _scale(recipe.root, about_mean, eps)
    lost = max(1.0, (x.shape[1] * epsilon(dtype)) ** 0.5)  # sums so long no longer grow
    plausible = visible & (ratio > 0.8) & (ratio < 1.2 * lost)
    overflows = _sum(x * x) > LARGEST[recipe.digits]
    vanished = overflows & (np.abs(fitted) < 1e-3 * scale)
    scale = np.where(overflows & np.isnan(target).all(axis=1, keepdims=True), np.nan, scale)
    return mean, np.where(plausible, best, np.where(vanished, 0.0, scale))


def _scale_of_squares(
    recipe: Recipe,
    centred: Float64,
    mean: Float64,
    var: Float64,
    eps: float,
    gamma: Float64,
    target: Float64,
) -> Float64:
    """The scale (n, 1) as y has it, where float32's rounding of E[x^2] and E[x]^2 can explain it."""
    width = centred.shape[1]
    if recipe.over != "rows" or recipe.root != "inside" or not recipe.centred:
        return np.full((len(centred), 1), np.nan)
    exact = _scale("inside", var, eps)
    column = centred * gamma
    fitted = _sum(column * target) / _sum(column * column)
    square = mean * mean
    room = (4 + width / 16) * 2.0**-24 * (var + square)
    found = 1 / (fitted * fitted) - eps
    explained = np.abs(found - var) <= room
    step = ulp(square, DTYPES["float32"])  # both terms of the difference are multiples of it
    moved = _scale("inside", np.rint(found / step) * step, eps)
    scale = np.where(explained, moved, exact)
    negative = np.isnan(target).all(axis=1, keepdims=True) & (var + eps <= room)
    return np.where(negative, np.nan, scale)


def round_to(values: Float64, dtype: DType) -> Float64:
    """Return values (float64) rounded to the nearest numbers of a floating dtype."""
    rounded = np.empty(values.shape, numpy_dtype(dtype))
    round_into(values.copy(), rounded)
    return rounded.astype(np.float64)
