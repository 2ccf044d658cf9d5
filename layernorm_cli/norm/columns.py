"""Batch normalization of one row, to set beside its layer norm: columns' moments, block by block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .rounding import widen_into
from .spec import Norm

__all__ = ["BatchRow", "ColumnMoments", "add_rows", "batch_row", "no_rows"]

Array = npt.NDArray[np.generic]
Float64 = npt.NDArray[np.float64]
LongDouble = npt.NDArray[np.longdouble]
TINY = 1e-280  # squares that small or as large have lost digits, or all


class ColumnMoments(NamedTuple):
    """What is known of some rows' columns, each (d,): mean of x - shift, and squares about that mean.

    shift is the first row: less it, what all rows have in common costs no digits.
    """

    shift: Float64
    rows: int
    mean: LongDouble
    squares: LongDouble


class BatchRow(NamedTuple):
    """One row in batch normalization, each (d,) float64: mean and var of its columns, xhat, y."""

    rows: int
    mean: Float64
    var: Float64
    xhat: Float64
    y: Float64


def no_rows(shift: Array) -> ColumnMoments:
    """Return the moments of no rows yet; shift (d,) is any of those to come."""
    wide = np.empty(shift.shape)
    widen_into(shift, wide)
    zeros = np.zeros(shift.shape, np.longdouble)
    return ColumnMoments(wide, 0, zeros, zeros)


def add_rows(moments: ColumnMoments, block: Array) -> ColumnMoments:
    """Return the moments of the rows so far and those of block (r, d), any real dtype, together.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """
    shift, before, mean, squares = moments
    rows = len(block)
    with np.errstate(all="ignore"):
        block_mean, block_squares = _moments(block, shift, np.float64)
        far = ~((block_squares > TINY) & (block_squares < 1 / TINY))
        if far.any():
            block_mean[far], block_squares[far] = _moments(block[:, far], shift[far], np.longdouble)
        delta = block_mean - mean
        total = before + rows
        mean = mean + delta * rows / total
        squares = squares + (block_squares + delta**2 * before * rows / total)
    return ColumnMoments(shift, total, mean, squares)


def _moments(block: Array, shift: Float64, dtype: type[np.floating]) -> tuple[LongDouble, LongDouble]:
    """The mean of block - shift, and the squares about it, computed in a dtype."""
    wide = np.empty(block.shape)
    widen_into(block, wide)
    a: npt.NDArray[Any] = wide.astype(dtype, copy=False)
    a -= shift
    rough_mean = a.mean(axis=0)
    a -= rough_mean
    residual = a.mean(axis=0).astype(np.longdouble)  # of the mean, which is rounded
    squares = np.einsum("ij,ij->j", a, a).astype(np.longdouble)
    return rough_mean + residual, squares - len(block) * residual**2


def batch_row(x: Float64, moments: ColumnMoments, norm: Norm) -> BatchRow:
    """Batch normalize the row x (d,) by the moments of its columns: norm's eps, gamma and beta.

    var is the population's. A column with a NaN or an inf is NaN; so is a constant one where eps is 0.

    Source: Ioffe, Szegedy, "Batch Normalization" (arXiv 1502.03167); torch.nn.functional.batch_norm.
    """
    with np.errstate(all="ignore"):
        var = moments.squares / moments.rows
        centred = x - moments.shift.astype(np.longdouble) - moments.mean
        xhat = centred / np.sqrt(var + norm.eps)
        y = xhat
        if norm.gamma is not None:
            y = y * norm.gamma
        if norm.beta is not None:
            y = y + norm.beta
        columns = (moments.shift + moments.mean, var, xhat, y)
        return BatchRow(moments.rows, *(column.astype(np.float64) for column in columns))
