"""layernorm explain: the arithmetic of one row, read alone from its file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError, UsageError
from ..norm.columns import BatchRow, ColumnMoments, add_rows, batch_row, no_rows
from ..norm.dtypes import DType
from ..norm.explanation import explain_row, flat_index
from ..norm.rounding import widen_into
from ..results import ExplainResult
from ..tensorfiles.reader import Tensor, open_tensor
from ..tensorfiles.refs import STDIN
from ..tensorfiles.rows import fortran_row, split
from .apply import axis_of
from .stated_norm import check_norm, state_norm

__all__ = ["ExplainRequest", "explain"]

Array = npt.NDArray[np.generic]
BLOCK_ELEMENTS = 1 << 18
BLOCK_ROWS = 1 << 13


class ExplainRequest(NamedTuple):
    """Which row to explain; row and grad are flat numbers, or an index for each axis."""

    x: str
    row: tuple[int, ...] = (0,)
    gamma: str | None = None
    beta: str | None = None
    params: str | None = None
    site: str | None = None
    eps: float | None = None
    kind: str | None = None
    gamma_offset: float | None = None
    axis: int = -1
    assume_dtype: DType | None = None
    grad: tuple[int, ...] | None = None
    compare_axis: bool = False


def explain(
    request: ExplainRequest, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> ExplainResult:
    """Read one row, and all where their columns are to be compared, and return each step of its norm.

    Raises UsageError, InputError.
    """
    check_norm(request)
    if (request.x, request.gamma, request.beta).count(STDIN) > 1:
        raise UsageError(STDIN, "standard input is given twice", "one tensor from it")
    with contextlib.ExitStack() as files:
        x = files.enter_context(open_tensor(request.x, request.assume_dtype))
        axis = axis_of(x, request.axis)
        rows, width = split(x.shape, axis)
        leading = x.shape[:axis]
        place = _place(request.row, leading, "row", x.ref)
        feature = None
        if request.grad is not None:
            feature = _place(request.grad, x.shape[axis:], "feature", x.ref)
        stated = state_norm(request, x.shape[axis:])
        row, moments = _read(x, axis, place, request.compare_axis, on_progress)
        wide = np.empty(width)
        widen_into(row, wide)
        batch: BatchRow | None = None
        if moments is not None:
            batch = batch_row(wide, moments, stated.norm)
        indices = tuple(int(i) for i in np.unravel_index(place, leading)) if leading else ()
        return ExplainResult(
            input=x.ref,
            tensor=x.name,
            shape=x.shape,
            dtype=x.dtype.name,
            kind=stated.norm.kind,
            axis=request.axis,
            eps_source=stated.eps_source,
            gamma=stated.gamma,
            beta=stated.beta,
            gamma_offset=stated.gamma_offset,
            rows=rows,
            steps=explain_row(wide, stated.norm, indices, feature, batch),
            warnings=tuple(x.warnings),
        )


def _place(index: tuple[int, ...], shape: tuple[int, ...], what: str, ref: str) -> int:
    try:
        return flat_index(index, shape, what)
    except UsageError as error:
        kind = UsageError if 0 not in shape else InputError
        raise kind(f"{ref}: {error.where}", error.found, error.expected, error.hint) from None


def _read(
    x: Tensor, axis: int, place: int, all_columns: bool, on_progress: Callable[[int, int], None]
) -> tuple[Array, ColumnMoments | None]:
    """The row at a place, and the moments of the columns where they are asked for.

    A pipe is read to its end in any case, so that what is wrong with it is seen.
    """
    if x.columns is not None and not all_columns:
        return fortran_row(x.columns, x.shape, axis, place), None
    source = x.rows(axis)
    if not (all_columns or source.sequential):
        return source.read_rows(place, place + 1)[0], None
    step = max(1, source.least_rows, min(BLOCK_ELEMENTS // source.width, BLOCK_ROWS))
    row, moments = None, None
    for start in range(0, source.rows, step):
        stop = min(start + step, source.rows)
        block = source.read_rows(start, stop)
        if start <= place < stop:
            row = block[place - start].copy()
        if all_columns:
            moments = add_rows(moments or no_rows(block[0]), block)
        on_progress(stop, source.rows)
    assert row is not None
    return row, moments
