"""Is y the layer norm of x? And if it is not, which known mistake made it?

One pass over all rows measures the errors. Variants are then tried on a sample of the rows, and the
one that explains it is tested on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .arrays import normalized_axis
from .closeness import Closeness, closeness
from .deviation import WORST, Deviation, deviation, merged, no_deviation
from .diagnosis import Candidate, diagnose
from .dtypes import dtype_of
from .forward import row_kernel
from .row_pairs import RowPairs, blocks
from .spec import DEFAULT_EPS, Norm, make_norm
from .variants import Stated

__all__ = ["VariantError", "Verdict", "WorstFeature", "WorstRow", "check", "verify"]

Array = npt.NDArray[np.generic]

LISTED = 10


class WorstRow(NamedTuple):
    """A row by its leading indices, and its largest error."""

    row: tuple[int, ...]
    max_abs_error: float


class WorstFeature(NamedTuple):
    """A feature by its indices in a row, and its largest error."""

    feature: tuple[int, ...]
    max_abs_error: float


class VariantError(NamedTuple):
    """A variant, how far y is from it at most, the eps in it, and whether it explains y."""

    variant: str
    max_abs_error: float
    eps: float
    explains: bool


class Verdict(NamedTuple):
    """Whether y is the norm of x, how far it is from it, and what it is instead.

    max_abs_error is from the unrounded result; max_ulp_error, in ulp of y's dtype, from the correctly
    rounded one, which exact_fraction of the elements are. best explains y on all rows. So may those of
    equally_good: the rows do not tell them apart. The other variants were tried on tried_rows rows.
    inferred_eps is None where the rows do not tell it.
    """

    match: bool
    kind: str
    eps: float
    shape: tuple[int, ...]
    rows: int
    dtype: str
    rtol: float
    atol: float
    max_abs_error: float
    max_ulp_error: float
    exact_fraction: float
    wrong_elements: int
    wrong_rows: int
    nonfinite_rows: int
    worst_rows: tuple[WorstRow, ...]
    worst_features: tuple[WorstFeature, ...]
    best: str | None
    equally_good: tuple[str, ...]
    variants: tuple[VariantError, ...]
    tried_rows: int
    inferred_eps: float | None
    notes: tuple[str, ...]


def verify(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    eps: float = DEFAULT_EPS,
    axis: int = -1,
    *,
    kind: str = "layer",
    gamma_offset: float = 0,
    residual: npt.ArrayLike | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verdict:
    """Say whether y is the layer norm of x (plus residual), and if not, which known mistake made it.

    x, residual and y: (..., d), any real dtypes; gamma, beta: shape x.shape[axis:], or None. The
    default tolerance is what engines of the coarser of both dtypes reach on rows like these; with
    rtol or atol it is abs(y - result) <= atol + rtol * abs(result), as in numpy.

    Raises UsageError for shapes, dtypes, tolerances or an eps that cannot be used.

    >>> x = np.random.default_rng(0).standard_normal((9, 8))
    >>> wrong = (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
    >>> verdict = verify(x, wrong, eps=0)
    >>> verdict.match, verdict.best
    (False, 'unbiased variance (d - 1)')
    """
    arrays = {"x": np.asarray(x), "y": np.asarray(y)}
    if residual is not None:
        arrays["residual"] = np.asarray(residual)
    dtypes = {name: dtype_of(array) for name, array in arrays.items()}
    shape = arrays["x"].shape
    for name, array in arrays.items():
        if array.shape != shape:
            raise UsageError(name, f"has shape {array.shape}", f"x's shape {shape}")
    axis = normalized_axis(shape, axis)
    norm = make_norm(kind, eps, gamma, beta, gamma_offset, shape[axis:])
    width = math.prod(shape[axis:])
    matrices = {name: array.reshape(-1, width) for name, array in arrays.items()}

    def read(start: int, stop: int) -> tuple[Array, Array | None, Array]:
        part = {name: matrix[start:stop] for name, matrix in matrices.items()}
        return part["x"], part.get("residual"), part["y"]

    pairs = RowPairs(shape, axis, dtypes["x"], dtypes["y"], residual is not None, read)
    return check(pairs, norm, gamma_offset, closeness(pairs.x, pairs.y, width, rtol, atol))


def check(
    pairs: RowPairs,
    norm: Norm,
    gamma_offset: float,
    close: Closeness,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Say whether y is the norm of x, row by row, and if not, which known mistake made it.

    on_progress is told rows done and rows in all, in the pass that measures.
    """
    kernel = row_kernel(norm, pairs.width)
    found = no_deviation(pairs.width)
    for block in blocks(pairs):
        found = merged(found, deviation(block, kernel, norm, pairs.y, close))
        if on_progress is not None:
            on_progress(int(block.numbers[-1]) + 1, pairs.rows)
    gamma = None if norm.gamma is None else norm.gamma - gamma_offset
    stated = Stated(norm.kind, norm.eps, gamma, norm.beta, gamma_offset, pairs.has_residual, pairs.y)
    answer = diagnose(pairs, stated, close, found)
    best = answer.best
    return Verdict(
        match=found.wrong == 0 and best is None,
        kind=norm.kind,
        eps=norm.eps,
        shape=pairs.shape,
        rows=pairs.rows,
        dtype=pairs.y.name,
        rtol=close.rtol,
        atol=close.atol,
        max_abs_error=found.max_abs,
        max_ulp_error=found.max_ulp,
        exact_fraction=found.exact / found.elements if found.elements else 1.0,
        wrong_elements=found.wrong,
        wrong_rows=found.wrong_rows,
        nonfinite_rows=found.nonfinite_rows,
        worst_rows=_worst_rows(found, pairs),
        worst_features=_worst_features(found, pairs),
        best=None if best is None else best.name,
        equally_good=tuple(one.name for one in answer.equally_good),
        variants=tuple(map(_variant_error, answer.ranked[:LISTED])),
        tried_rows=answer.tried_rows,
        inferred_eps=answer.inferred_eps,
        notes=(*answer.notes, *_notes(found, close, pairs, norm.eps, answer.inferred_eps)),
    )


def _worst_rows(found: Deviation, pairs: RowPairs) -> tuple[WorstRow, ...]:
    leading = pairs.shape[: pairs.axis]
    return tuple(WorstRow(_indices(row, leading), error) for _, error, row in found.worst if error > 0)


def _worst_features(found: Deviation, pairs: RowPairs) -> tuple[WorstFeature, ...]:
    trailing = pairs.shape[pairs.axis :]
    order = np.argsort(-found.features, kind="stable")[:WORST].tolist()
    return tuple(
        WorstFeature(_indices(at, trailing), float(found.features[at]))
        for at in order
        if found.features[at] > 0
    )


def _variant_error(one: Candidate) -> VariantError:
    return VariantError(one.name, one.max_abs_error, one.recipe.eps, one.explains)


def _notes(
    found: Deviation, close: Closeness, pairs: RowPairs, eps: float, inferred: float | None
) -> list[str]:
    notes = []
    if found.wrong == 0 and inferred is not None and abs(inferred - eps) > max(inferred, eps) / 2:
        seen = f"like eps {inferred:.2g}" if inferred else "like no eps, or a tiny one"
        notes.append(f"within the tolerance, yet the rows look {seen}, not {eps:g}")
    if found.wrong and not found.beyond:
        notes.append("within what engines of this dtype reach; only the tolerance asked for is stricter")
    if found.hopeless_rows and not close.given and found.exact < found.elements:
        notes.append(
            f"{found.hopeless_rows} of {pairs.rows} rows have a mean so large against their spread that "
            "engines of this dtype lose most digits; errors there say little"
        )
    return notes


def _indices(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(place, shape)) if shape else ()
