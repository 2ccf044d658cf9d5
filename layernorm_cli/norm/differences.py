"""Gradients against finite differences of the forward pass, which knows nothing of the backward one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .backward import Gradients
from .forward import row_kernel
from .spec import Norm

__all__ = ["GradientErrors", "gradient_errors"]

Float64 = npt.NDArray[np.float64]
STEP = 2.0**-9  # in standard deviations of a row: its fourth power is a few float64 ulp


class GradientErrors(NamedTuple):
    """The largest relative error of each gradient over all directions; NaN without rows."""

    dx: float
    dgamma: float
    dbeta: float


def gradient_errors(
    x: Float64, dy: Float64, norm: Norm, found: Gradients, directions: int, seed: int = 0
) -> GradientErrors:
    """Compare gradients of sum(dy * y) with its differences along random directions.

    x and dy (r, d) float64, found of these rows. The difference is the central one of fourth order, in
    float64. An error is relative to what random signs would make of the terms of the product of
    gradient and direction, so that their cancelling does not count.
    """
    rng = np.random.default_rng(seed)
    rows, width = x.shape
    if rows == 0:
        return GradientErrors(np.nan, np.nan, np.nan)
    gamma = np.ones(width) if norm.gamma is None else norm.gamma
    beta = np.zeros(width) if norm.beta is None else norm.beta
    scale = 1 / row_kernel(Norm(norm.kind, norm.eps), width)(x, None).rstd[:, None]
    forward = _forward(norm, width)
    worst = np.zeros(3)
    for _ in range(directions):
        along_x = rng.standard_normal(x.shape) * scale
        along_gamma, along_beta = rng.standard_normal((2, width))
        slopes = (
            _slope(lambda h, v=along_x: forward(x + h * v, gamma, beta), dy),  # type: ignore[misc]
            _slope(lambda h, v=along_gamma: forward(x, gamma + h * v, beta), dy),  # type: ignore[misc]
            _slope(lambda h, v=along_beta: forward(x, gamma, beta + h * v), dy),  # type: ignore[misc]
        )
        parts = (found.dx * along_x, found.dgamma * along_gamma, found.dbeta * along_beta)
        for index, (slope, part) in enumerate(zip(slopes, parts, strict=True)):
            size = np.sqrt(np.square(part).sum())
            error = abs(part.sum() - slope)
            worst[index] = max(worst[index], error / size if size else error)
    return GradientErrors(*worst.tolist())


def _forward(norm: Norm, width: int) -> Callable[[Float64, Float64, Float64], Float64]:
    def forward(x: Float64, gamma: Float64, beta: Float64) -> Float64:
        y = np.empty(x.shape)
        row_kernel(Norm(norm.kind, norm.eps, gamma, beta), width)(x, y)
        return y

    return forward


def _slope(y: Callable[[float], Float64], dy: Float64) -> float:
    """The derivative of sum(dy * y(h)) at 0."""
    near, far = y(STEP) - y(-STEP), y(2 * STEP) - y(-2 * STEP)
    return float((dy * (8 * near - far)).sum() / (12 * STEP))
