"""Which known mistake made y: variants, and pairs of them, tried on a sample and then on all rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .closeness import SHORT_EPSILON, Closeness, closeness, epsilon, ulp
from .deviation import Deviation, distance
from .dtypes import DTYPES
from .row_pairs import Block, RowPairs, blocks, picked_rows, total
from .variants import (
    COMPUTED,
    INFERRED,
    VARIANTS,
    Prediction,
    Recipe,
    Rows,
    Stated,
    Variant,
    changed,
    named,
    pairs,
    predict,
    round_to,
    stated_recipe,
)

__all__ = ["Candidate", "Diagnosis", "diagnose", "sample_rows"]

Float64 = npt.NDArray[np.float64]
Columns = Mapping[tuple[str, str], tuple[Float64, Float64, int]]

SAMPLE_ELEMENTS = 1 << 17
SCREEN_ELEMENTS = 1 << 13  # enough to refute most variants
RUNS = 8  # of rows that follow on each other, where single ones are slow to read
FIRST_AXIS_ELEMENTS = 1 << 20
CONFIRMED = 4  # variants tested on all rows, at the most
TIE = 3.0  # a log likelihood ratio below this tells nothing apart
SYSTEMATIC = 2.0  # epsilons that no engine is off on average
NEARER = 8.0
MOSTLY = 0.9  # if so many are correctly rounded, nothing is wrong with all of them
SLIGHTLY_NEARER = 1.5
ENOUGH_ROWS, ENOUGH_ELEMENTS = 16, 1000
VACUOUS = 8.0  # times what is to be explained
SURE = 3.0  # standard deviations
TOLD = 0.2  # a larger standard deviation, relative to eps, tells nothing


class Candidate(NamedTuple):
    """A variant or pair in words, and how y compares with what it makes of some rows.

    units is the root mean square of the errors, in epsilons of the terms of the stated norm; eps_sd is
    the standard deviation of an inferred eps, else 0.
    """

    name: str
    recipe: Recipe
    max_abs_error: float
    units: float
    explains: bool
    eps_sd: float = 0.0


class Diagnosis(NamedTuple):
    """What made y: best, and those equally_good; all that were tried, ranked, on so many rows."""

    best: Candidate | None
    equally_good: tuple[Candidate, ...]
    ranked: tuple[Candidate, ...]
    tried_rows: int
    inferred_eps: float | None
    notes: tuple[str, ...]


def sample_rows(pairs: RowPairs, found: Deviation) -> Block:
    """Return rows spread over all, with the worst and the flattest, less those with NaN and inf in x."""
    count = min(pairs.rows, max(2, SAMPLE_ELEMENTS // pairs.width))
    if not count:
        nothing = np.empty((0, pairs.width))
        return Block(np.empty(0, np.intp), nothing, nothing if pairs.has_residual else None, nothing)
    run = min(pairs.run, max(1, count // RUNS))
    starts = np.unique(np.linspace(0, pairs.rows - run, -(-count // run)).astype(np.intp))
    spread = (starts[:, None] + np.arange(run)).reshape(-1)
    special = [row[-1] for row in (*found.worst, *found.flattest)]
    block = picked_rows(pairs, np.unique(np.array([*spread, *special], np.intp)))
    return _only(block, _finite(block))


def diagnose(rows: RowPairs, stated: Stated, close: Closeness, found: Deviation) -> Diagnosis:
    """Look for what made y; best is the stated norm itself only where y agrees with it.

    Where y is within the tolerance, a variant is named only where it is much nearer than any engine's
    rounding would allow.
    """
    sample = sample_rows(rows, found)
    base = stated_recipe(stated)
    trial = _Trial(stated, close, base, sample, np.empty(0), math.inf, {})
    made = _predict(trial, base, sample)
    off = _root_mean_square(distance(sample.y, made.y, stated.y))
    room = VACUOUS * max(off, _root_mean_square(close.default(made.terms)))
    trial = trial._replace(terms=made.terms, room=room)
    itself = _judge(trial, base, sample, trial.terms, "as stated")
    if len(sample.y) == 0 or (found.wrong and itself.explains):
        return _nothing(trial, None)
    if found.wrong == 0:
        average = math.sqrt(found.squares / max(1, found.elements))
        if close.given or found.exact > MOSTLY * found.elements:
            return _nothing(trial, itself)
        if average <= SYSTEMATIC:
            few = close.unit >= SHORT_EPSILON
            return _in_few_digits(trial, itself) if few else _nothing(trial, itself)
        return _systematic(rows, trial, itself, average)
    return _search(rows, trial)


class _Trial(NamedTuple):
    """What variants are tried on, with the terms of the stated norm, and statistics of columns.

    room is how large a tolerance may be on average without explaining anything whatever.
    """

    stated: Stated
    close: Closeness
    base: Recipe
    sample: Block
    terms: Float64
    room: float
    columns: Columns


def _predict(trial: _Trial, recipe: Recipe, block: Block) -> Prediction:
    columns = {
        key: (mean[block.numbers % len(mean)], var[block.numbers % len(var)], count)
        for key, (mean, var, count) in trial.columns.items()
    }
    unit = trial.close.unit
    if recipe.output in DTYPES:
        unit = max(unit, epsilon(DTYPES[recipe.output]))
    return predict(recipe, Rows(block.x, block.residual, block.y, columns), trial.stated, unit)


def _judge(
    trial: _Trial, recipe: Recipe, block: Block, terms: Float64 | None = None, name: str = ""
) -> Candidate:
    """Compare y with what a recipe makes of a block; terms are the stated norm's, else the recipe's."""
    made = _predict(trial, recipe, block)
    recipe = recipe._replace(eps=made.eps)
    y = block.y
    if not y.size:
        return Candidate(name, recipe, 0.0, 0.0, True)
    with np.errstate(all="ignore"):
        off = distance(y, made.y, trial.stated.y)
        shown, bound = off, trial.close.default(made.terms)
        if trial.close.given:
            bound = np.maximum(bound, trial.close.bound(made.y, made.terms))
        if recipe.output != "own":
            shown, off = _less_rounding(recipe.output, y, made.y)
        if recipe.computed != "exactly":
            dtype = DTYPES[recipe.computed]
            bound = bound + 2 * closeness(dtype, dtype, y.shape[1]).default(made.terms)
        units = trial.close.units(off, made.terms if terms is None else terms)
        units = units[(off > 0) | np.isfinite(units)]
    vacuous = recipe.computed == "exactly" and _root_mean_square(bound) > trial.room
    near = (off == 0) | ((off <= bound) & np.isfinite(bound))
    explains = bool(near.all()) and not vacuous
    return Candidate(name, recipe, float(shown.max()), _root_mean_square(units), explains, made.eps_sd)


def _root_mean_square(values: Float64) -> float:
    """Of those that are finite; 0 where none is."""
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.square(finite).mean())) if finite.size else 0.0


def _less_rounding(output: str, y: Float64, made: Float64) -> tuple[Float64, Float64]:
    """How far y is from made rounded to a dtype, and how far beyond what that rounding can do."""
    if output == "integers":
        off = np.minimum(np.abs(y - np.trunc(made)), np.abs(y - np.rint(made)))
        return off, np.where(np.abs(y - made) < 1, 0, np.inf)
    dtype = DTYPES[output]
    off = distance(y, round_to(made, dtype), dtype)
    beyond = np.maximum(np.abs(y - made) - ulp(y, dtype) / 2, 0)
    beyond[off == 0] = 0
    beyond[np.isnan(beyond) | (distance(y, round_to(y, dtype), dtype) > 0)] = np.inf
    return off, beyond


def _try(trial: _Trial, variants: Iterable[tuple[Variant, ...]]) -> list[Candidate]:
    """Try variants, or pairs of them, on a few rows, and those that pass on the whole sample."""
    sample = trial.sample
    few = max(2, SCREEN_ELEMENTS // sample.y.shape[1])
    picked = np.zeros(len(sample.y), np.bool_)
    picked[np.linspace(0, len(sample.y) - 1, min(few, len(sample.y))).astype(np.intp)] = True
    screen = _only(sample, picked)
    tried = []
    for together in variants:
        recipe = trial.base
        for variant in together:
            recipe = changed(recipe, variant)
        found = _judge(trial, recipe, screen, trial.terms[picked])
        if found.explains or len(together) == 1:
            found = _judge(trial, recipe, sample, trial.terms)
        eps = found.recipe.eps
        if math.isfinite(eps) and (not found.eps_sd or len(sample.y) > 1):  # one row tells no eps
            name = ", and ".join(named(variant, trial.base, eps) for variant in together)
            tried.append(found._replace(name=name))
    return tried


def _ranked(tried: Sequence[Candidate], elements: int) -> tuple[list[Candidate], int]:
    """Rank what was tried, given simple ones first, and return how many of the first are equally good.

    Those that explain y come first, by error, but where that tells nothing apart the simpler ones.
    """
    good = [one for one in tried if one.explains]
    known = {one.recipe._replace(eps=0.0) for one in good if not one.eps_sd}
    good = [one for one in good if not one.eps_sd or one.recipe._replace(eps=0.0) not in known]
    good = [one for at, one in enumerate(good) if not _has_digits_of(good[:at], one)]
    least = min((one.units for one in good), default=0.0)

    def ties(one: Candidate) -> bool:
        return elements / 8 * math.log((one.units + 1e-3) / (least + 1e-3)) < TIE

    equal = [one for one in good if ties(one)]
    rest = sorted((one for one in good if not ties(one)), key=lambda one: one.units)
    bad = sorted((one for one in tried if not one.explains), key=lambda one: one.max_abs_error)
    return [*equal, *rest, *bad], len(equal)


def _has_digits_of(simpler: Sequence[Candidate], one: Candidate) -> bool:
    """Whether fewer digits explain the same: numbers of bfloat16 are numbers of float32 as well."""
    short = one.recipe.digits in DTYPES and one.recipe.digits != "float64"
    return short and any(
        other.recipe._replace(digits=one.recipe.digits) == one.recipe
        for other in simpler
        if other.recipe.digits in DTYPES and other.recipe.digits != "float64"
    )


def _search(rows: RowPairs, trial: _Trial) -> Diagnosis:
    """Try single variants, then pairs, then what says least, until one explains all rows."""
    variants = [
        variant
        for variant in VARIANTS
        if variant.when(trial.stated) and changed(trial.base, variant) != trial.base
    ]
    short = [variant for variant in variants if "digits" in variant.change]
    across = [variant for variant in variants if "over" in variant.change]
    plain = [variant for variant in variants if variant not in short and variant not in across]
    tried: list[Candidate] = []
    notes: list[str] = []
    for step in ("plain", "across", "short", "pairs", "computed"):
        if step == "across":
            trial = trial._replace(columns=_columns(rows))
            across = [one for one in across if ("sum", one.change["over"]) in trial.columns]
            variants = [one for one in variants if one in plain or one in short or one in across]
        together: Iterable[tuple[Variant, ...]] = {
            "plain": [(one,) for one in plain],
            "across": [(one,) for one in across],
            "short": [(one,) for one in short],
            "pairs": pairs(variants),
            "computed": [(one,) for one in COMPUTED if one.when(trial.stated)],
        }[step]
        new = _try(trial, together)
        if step == "pairs":
            new = [one for one in new if one.explains]
        ranked, equal = _ranked(new, trial.sample.y.size)
        for at, one in enumerate(ranked[:equal][:CONFIRMED]):
            whole = _on_all_rows(rows, trial, one)
            ranked[at] = whole
            if whole.explains:
                others = [*ranked[:at], *ranked[at + 1 :]]
                also = _others(trial, whole, ranked[at + 1 : equal])
                rest = sorted([*others[equal - 1 :], *tried], key=_error)
                every = (whole, *also, *(o for o in rest if o not in also))
                return Diagnosis(whole, also, every, len(trial.sample.y), _inferred(trial, whole), ())
            notes.append(f"explains the {len(trial.sample.y)} rows it was tried on, not all: {one.name}")
        tried += ranked
    every = tuple(sorted(tried, key=_error))
    return Diagnosis(None, (), every, len(trial.sample.y), None, tuple(notes))


def _others(trial: _Trial, best: Candidate, equal: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that explain y as well as the best, but not the ones that only do more than it."""

    def steps(one: Candidate) -> set[str]:
        base = trial.base._asdict()
        return {step for step, value in one.recipe._asdict().items() if value != base[step]}

    return tuple(one for one in equal if one.explains and not steps(one) > steps(best))


def _error(one: Candidate) -> float:
    return one.max_abs_error


def _nearer(trial: _Trial, itself: Candidate, times: float) -> tuple[list[Candidate], int]:
    """Rank the variants that are so many times nearer than the stated norm; count the equally good."""
    variants = [
        (one,)
        for one in VARIANTS
        if one.when(trial.stated)
        and changed(trial.base, one) != trial.base
        and not {"digits", "over"} & set(one.change)
        and one.change.get("eps") != INFERRED
    ]
    tried = _try(trial, variants)
    near = [one for one in tried if one.explains and one.units * times <= itself.units]
    return _ranked(near, trial.sample.y.size)


def _systematic(rows: RowPairs, trial: _Trial, itself: Candidate, average: float) -> Diagnosis:
    """Look for a variant that is much nearer, where y is within the tolerance, yet far on average."""
    ranked, equal = _nearer(trial, itself, NEARER)
    if not ranked:
        return _nothing(trial, itself)
    best = _on_all_rows(rows, trial, ranked[0])
    if not best.explains or best.units * NEARER > average:
        return _nothing(trial, itself)
    note = (
        f"each element is within the tolerance, but their errors, {average:.3g} epsilons on "
        f"average, are {best.units:.3g} from this"
    )
    also = _others(trial, best, ranked[1:equal])
    return Diagnosis(
        best, also, (best, *ranked[1:]), len(trial.sample.y), _inferred(trial, best), (note,)
    )


def _in_few_digits(trial: _Trial, itself: Candidate) -> Diagnosis:
    """Note which variant is nearer, where y has so few digits that both are within the tolerance."""
    answer = _nothing(trial, itself)
    if len(trial.sample.y) < ENOUGH_ROWS or trial.sample.y.size < ENOUGH_ELEMENTS:
        return answer
    ranked, _ = _nearer(trial, itself, SLIGHTLY_NEARER)
    if not ranked:
        return answer
    note = (
        f"within the tolerance, yet all elements together are nearer to: {ranked[0].name} "
        f"(errors of {ranked[0].units:.2g} epsilons on average, not {itself.units:.2g})"
    )
    return answer._replace(notes=(note,))


def _on_all_rows(rows: RowPairs, trial: _Trial, one: Candidate) -> Candidate:
    """Test a candidate on all rows whose x is finite."""
    if len(trial.sample.y) == rows.rows:
        return one
    error, explains, squares, rows_seen = 0.0, True, 0.0, 0
    for block in blocks(rows):
        whole = _only(block, _finite(block))
        found = _judge(trial, one.recipe, whole)
        error, explains = max(error, found.max_abs_error), explains and found.explains
        squares += found.units**2 * len(whole.y)
        rows_seen += len(whole.y)
    units = math.sqrt(squares / max(1, rows_seen))
    return one._replace(max_abs_error=error, explains=explains, units=units)


def _inferred(trial: _Trial, one: Candidate) -> float | None:
    """The eps of the rows, where they tell it."""
    if not len(trial.sample.y) or one.recipe.digits != "float64":
        return None
    made = _predict(trial, one.recipe._replace(eps=INFERRED), trial.sample)
    doubt = SURE * made.eps_sd
    if not doubt <= TOLD * max(made.eps, trial.stated.eps):
        return None
    return made.eps if made.eps > doubt else 0.0


def _nothing(trial: _Trial, itself: Candidate | None) -> Diagnosis:
    inferred = None if itself is None else _inferred(trial, itself)
    return Diagnosis(None, (), (), len(trial.sample.y), inferred, ())


def _finite(block: Block) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isfinite(total(block)).all(axis=1))


def _only(block: Block, which: npt.NDArray[np.bool_]) -> Block:
    """Some rows of a block."""
    if which.all():
        return block
    residual = None if block.residual is None else block.residual[which]
    return Block(block.numbers[which], block.x[which], residual, block.y[which])


def _columns(rows: RowPairs) -> Columns:
    """mean, var and count over all rows, over the first axis, and over all axes; in one pass."""
    leading = rows.shape[: rows.axis]
    period = math.prod(leading[1:])
    if not leading or period * rows.width > FIRST_AXIS_ELEMENTS:
        period = 1
    sources = ("sum", "x") if rows.has_residual else ("sum",)
    found = {source: _Moments(0, np.zeros((1, 1)), np.zeros((1, 1))) for source in sources}
    for block in blocks(rows, period):
        for source in sources:
            x = total(block) if source == "sum" else block.x
            cube = x.reshape(-1, period, rows.width)
            with np.errstate(all="ignore"):
                mean = cube.mean(axis=0)
                squares = np.square(cube - mean).sum(axis=0)
                found[source] = _joined(found[source], _Moments(len(cube), mean, squares))
    columns = {}
    for source, moments in found.items():
        with np.errstate(all="ignore"):
            features = _pooled(moments, 0)
            if 1 < moments.number < features.number:
                columns[source, "first axis"] = _as_columns(moments)
            if features.number > 1:
                columns[source, "columns"] = _as_columns(features)
            columns[source, "all"] = _as_columns(_pooled(features, 1))
    if not rows.has_residual:
        columns |= {("x", over): values for (_, over), values in columns.items()}
    return columns


class _Moments(NamedTuple):
    """Each column's number of values, their mean, and the sum of squares of what is centred."""

    number: int
    mean: Float64
    squares: Float64


def _joined(one: _Moments, other: _Moments) -> _Moments:
    count = one.number + other.number
    step = other.mean - one.mean
    mean = one.mean + step * (other.number / count)
    squares = one.squares + other.squares + step * step * (one.number * other.number / count)
    return _Moments(count, mean, squares)


def _pooled(moments: _Moments, axis: int) -> _Moments:
    """The moments of columns taken together along an axis."""
    mean = moments.mean.mean(axis=axis, keepdims=True)
    between = np.square(moments.mean - mean).sum(axis=axis, keepdims=True)
    squares = moments.squares.sum(axis=axis, keepdims=True) + moments.number * between
    return _Moments(moments.number * moments.mean.shape[axis], mean, squares)


def _as_columns(moments: _Moments) -> tuple[Float64, Float64, int]:
    return moments.mean, moments.squares / moments.number, moments.number
