"""What to compute: the kind of norm, eps, and the parameters in float64."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .dtypes import DTYPES
from .rounding import widen_into

__all__ = ["DEFAULT_EPS", "Kind", "Norm", "check_eps", "make_norm", "parse_eps"]

Kind = Literal["layer", "rms"]
DEFAULT_EPS = 1e-5


class Norm(NamedTuple):
    """One normalization: gamma (d,) float64, its offset added, None for 1; beta (d,), None for 0."""

    kind: Kind = "layer"
    eps: float = DEFAULT_EPS
    gamma: npt.NDArray[np.float64] | None = None
    beta: npt.NDArray[np.float64] | None = None


def check_eps(eps: float) -> float:
    """Return eps as a float; Raises UsageError unless it is finite and not negative."""
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(f"eps {eps!r}", "not a usable eps", "a finite number, 0 or more")
    return float(eps) + 0.0  # -0.0 becomes 0.0


def parse_eps(text: str) -> float:
    """Return the eps that a user typed; Raises UsageError for all but plain decimals of 0 or more.

    nan, inf, 1_0, 0x1p-3 and numbers that underflow to 0 are refused, though float() reads them.

    >>> parse_eps("1e-5")
    1e-05
    """
    where = f"eps {text!r}"
    number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text.strip(), re.ASCII)
    if number is None:
        raise UsageError(where, "not a decimal number", "a number such as 1e-5")
    eps = float(number[0])
    if eps == 0 and re.search("[1-9]", number[1]):
        raise UsageError(where, "too small: it underflows to 0", "0, or at least 5e-324")
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(where, "not a usable eps", "a finite number, 0 or more")
    return check_eps(eps)


def make_norm(
    kind: str = "layer",
    eps: float = DEFAULT_EPS,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    gamma_offset: float = 0,
    shape: tuple[int, ...] | None = None,
) -> Norm:
    """Return a checked Norm; shape is the normalized shape, which gamma and beta must have.

    Raises UsageError for an unknown kind, an unusable eps, or another shape.
    """
    if kind not in ("layer", "rms"):
        raise UsageError(f"kind {kind!r}", "not a kind of norm", "layer or rms")
    if gamma_offset not in (0, 1):
        raise UsageError(
            f"gamma offset {gamma_offset!r}",
            "not an offset that any model family uses",
            "0, or 1 where the file stores gamma - 1",
        )
    wide_gamma = _parameter("gamma", gamma, shape)
    if wide_gamma is not None:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            wide_gamma = wide_gamma + gamma_offset
    return Norm(cast(Kind, kind), check_eps(eps), wide_gamma, _parameter("beta", beta, shape))


def _parameter(
    name: str, values: npt.ArrayLike | None, shape: tuple[int, ...] | None
) -> npt.NDArray[np.float64] | None:
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype.name not in DTYPES:
        raise UsageError(name, f"has dtype {array.dtype}", "a real number per feature")
    if shape is not None and array.shape != shape:
        raise UsageError(
            name,
            f"has shape {array.shape}",
            f"shape {shape}, one value per normalized feature of x (nothing is broadcast)",
        )
    wide = np.empty(array.shape)
    widen_into(array, wide)
    return wide.reshape(-1)
