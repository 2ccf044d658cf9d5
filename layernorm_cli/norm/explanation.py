"""The arithmetic of one row, step by step, and what eps does to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index as as_int
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .arrays import normalized_axis
from .columns import BatchRow, add_rows, batch_row, no_rows
from .dtypes import DTYPES, dtype_of
from .forward import TINY, VISIBLE, row_kernel
from .low_precision import InDType, norm_in_dtype
from .rounding import widen_into
from .spec import DEFAULT_EPS, Norm, make_norm
from .sums import sum_rows

__all__ = [
    "EpsEffect",
    "Explanation",
    "Scaled",
    "SweepPoint",
    "explain",
    "explain_row",
    "flat_index",
    "jacobian_column",
]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
SWEEP = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
SHORT_DTYPES = ("float16", "bfloat16", "float32")
FACTOR = 40.0
BLOCK_ELEMENTS = 1 << 18
HUGE = 1e290  # an eps below it is nothing against a var that overflows


class EpsEffect(NamedTuple):
    """var_ratio = var / (var + eps), the var of xhat; shrink_percent: how far that is below 1."""

    var_ratio: float
    shrink_percent: float


class SweepPoint(NamedTuple):
    """The var of xhat that an eps would leave."""

    eps: float
    var_after: float


class Scaled(NamedTuple):
    """What y does where x is multiplied by factor: its largest change, and the var of xhat then."""

    factor: float
    max_abs_change: float
    var_after: float


class Explanation(NamedTuple):
    """Every step of one row's norm in float64; x and what has a value per feature is (d,).

    row is its leading indices. centred is x less its mean (x itself for rms norms, whose var is the mean
    square), squared its squares; std = sqrt(var + eps), rstd = 1 / std, xhat = centred * rstd,
    y = xhat * gamma_values + beta_values, with the offset in gamma_values. Where squares overflow or
    vanish, squared and var do so, and std, rstd, xhat and y are right all the same. grad is
    d y / d x[grad_feature]; compare_axis is the row in batch normalization.
    """

    row: tuple[int, ...]
    x: Float64
    mean: float
    centred: Float64
    squared: Float64
    var: float
    eps: float
    std: float
    rstd: float
    xhat: Float64
    gamma_values: Float64 | None
    beta_values: Float64 | None
    y: Float64
    eps_effect: EpsEffect
    sweep: tuple[SweepPoint, ...]
    dtypes: tuple[InDType, ...]
    scaled: Scaled
    grad_feature: int | None
    grad: Float64 | None
    compare_axis: BatchRow | None


def explain(
    x: npt.ArrayLike,
    row: int | Sequence[int] = 0,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    eps: float = DEFAULT_EPS,
    axis: int = -1,
    *,
    kind: str = "layer",
    gamma_offset: float = 0,
    grad: int | Sequence[int] | None = None,
    compare_axis: bool = False,
) -> Explanation:
    """Return every step of layer_norm for one row of x, what eps does to it, and its derivatives.

    x: (..., d), any real dtype; gamma, beta: shape x.shape[axis:], or None. row is the number of a row,
    in C order, or its leading indices; negative ones count from the end. grad is a feature j, counted
    likewise: the record's grad is then the column d y / d x_j of the Jacobian. With compare_axis there
    is the row in batch normalization too, over all rows of x. The record's y has layer_norm's bits.

    Raises UsageError for shapes, dtypes or an eps that cannot be used, and indices out of range.

    Sources: as layer_norm; the derivatives are those of its backward pass.

    >>> steps = explain([[2, 6, -2, 4]], eps=0)
    >>> steps.mean, steps.var, steps.squared.tolist()
    (2.5, 8.75, [0.25, 12.25, 20.25, 2.25])
    >>> explain([[2, 6, -2, 4]], grad=0).grad.round(4)
    array([ 0.2511, -0.0676, -0.1062, -0.0773])
    """
    array = np.asarray(x)
    dtype_of(array)
    axis = normalized_axis(array.shape, axis)
    leading, features = array.shape[:axis], array.shape[axis:]
    norm = make_norm(kind, eps, gamma, beta, gamma_offset, features)
    place = flat_index(row, leading, "row")
    feature = None if grad is None else flat_index(grad, features, "feature")
    width = math.prod(features)
    rows = array.reshape(-1, width)
    wide = np.empty(width)
    widen_into(rows[place], wide)
    batch = None
    if compare_axis:
        moments = no_rows(rows[0])
        step = max(1, BLOCK_ELEMENTS // width)
        for start in range(0, len(rows), step):
            moments = add_rows(moments, rows[start : start + step])
        batch = batch_row(wide, moments, norm)
    indices = tuple(int(i) for i in np.unravel_index(place, leading)) if leading else ()
    return explain_row(wide, norm, indices, feature, batch)


def explain_row(
    x: Float64,
    norm: Norm,
    row: tuple[int, ...] = (),
    grad: int | None = None,
    batch: BatchRow | None = None,
) -> Explanation:
    """Return every step of the norm of one row x (d,) float64."""
    width = x.size
    plain = Norm(norm.kind, norm.eps)
    y, xhat = np.empty((1, width)), np.empty((1, width))
    row_kernel(norm, width)(x[None], y)
    stats = row_kernel(plain, width)(x[None], xhat)
    mean, var, rstd = float(stats.mean[0]), float(stats.var[0]), float(stats.rstd[0])
    with np.errstate(all="ignore"):
        centred = x.copy() if norm.kind == "rms" else _centred(x, mean, var)
        squared = centred * centred
        below = var + norm.eps
        std = math.sqrt(below) if TINY < below < math.inf else float(1 / stats.rstd[0])
        smaller = Norm(norm.kind, norm.eps / FACTOR**2, norm.gamma, norm.beta)
        scaled_y = np.empty((1, width))
        row_kernel(smaller, width)(x[None], scaled_y)  # less rounding than the norm of FACTOR * x
        scaled = Scaled(FACTOR, float(np.abs(scaled_y - y).max()), _effect(x, smaller, var).var_ratio)
    sweep = sorted({*SWEEP, norm.eps})
    return Explanation(
        row=row,
        x=x,
        mean=mean,
        centred=centred,
        squared=squared,
        var=var,
        eps=norm.eps,
        std=std,
        rstd=rstd,
        xhat=xhat[0],
        gamma_values=norm.gamma,
        beta_values=norm.beta,
        y=y[0],
        eps_effect=_effect(x, norm, var),
        sweep=tuple(SweepPoint(eps, _effect(x, Norm(norm.kind, eps), var).var_ratio) for eps in sweep),
        dtypes=tuple(norm_in_dtype(x, norm, y[0], DTYPES[name]) for name in SHORT_DTYPES),
        scaled=scaled,
        grad_feature=grad,
        grad=None if grad is None else jacobian_column(xhat[0], rstd, norm, grad),
        compare_axis=batch,
    )


def jacobian_column(xhat: Float64, rstd: float, norm: Norm, j: int) -> Float64:
    """Return d y / d x_j of one row, (d,) float64: gamma * rstd * (delta_ij - 1/d - xhat_i xhat_j / d).

    rms norms have no term 1/d. The others are why every y moves with x_j: it moves mean and var.
    """
    width = xhat.size
    with np.errstate(all="ignore"):
        column: Float64 = -(xhat * xhat[j]) / width
        if norm.kind == "layer":
            column -= 1 / width
        column[j] += 1
        column *= rstd
        if norm.gamma is not None:
            column *= norm.gamma
    return column


def flat_index(index: int | Sequence[int], shape: tuple[int, ...], what: str) -> int:
    """Return the place in C order of an index: a place already, or one index for each axis of shape.

    Negative ones count from the end. Raises UsageError that says the range, where it is out of it.

    >>> flat_index((1, -1), (2, 24), "row"), flat_index(-1, (2, 24), "row")
    (47, 47)
    """
    indices = tuple(map(as_int, index)) if isinstance(index, Sequence) else (as_int(index),)
    where = f"{what} {','.join(map(str, indices))}"
    count = math.prod(shape)
    if count == 0:
        raise UsageError(where, f"there are no {what}s", f"{what}s in shape {shape} to choose from")
    ranges = (count,) if len(indices) == 1 else shape
    if len(indices) != len(ranges):
        expected = f"the number of a {what}, or {len(shape)} indices, for shape {shape}"
        raise UsageError(where, f"{len(indices)} indices", expected)
    if not all(-size <= i < size for i, size in zip(indices, ranges, strict=True)):
        expected = ", ".join(f"{-size} to {size - 1}" for size in ranges)
        raise UsageError(where, "out of range", f"{expected} ({what}s of shape {shape})")
    return int(np.ravel_multi_index([i % n for i, n in zip(indices, ranges, strict=True)], ranges))


def _centred(x: Float64, mean: float, var: float) -> Float64:
    """x - mean, less what the mean's own rounding has left in it."""
    centred: Float64 = x - mean
    residual = sum_rows(centred[None])[0] / x.size
    if np.isfinite(residual) and abs(residual) > VISIBLE * math.sqrt(var):
        centred -= residual
    return centred


def _effect(x: Float64, norm: Norm, var: float) -> EpsEffect:
    """What eps does: exact from var, or from the var of xhat itself where var is out of range."""
    below = var + norm.eps
    if TINY < below < math.inf:
        return EpsEffect(var / below, 100 * norm.eps / below)
    xhat = np.empty((1, x.size))
    row_kernel(Norm(norm.kind, norm.eps), x.size)(x[None], xhat)
    ratio = float(np.minimum(sum_rows(xhat * xhat)[0] / x.size, 1.0))
    if not math.isnan(ratio) and norm.eps < (HUGE if math.isinf(var) else math.ulp(0.0)):
        ratio = 1.0
    return EpsEffect(ratio, 100 * (1 - ratio))
