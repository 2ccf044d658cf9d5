"""Truth for the tests of the mathematics, and rows to test it on.

exact_* are correct for any finite row: rational arithmetic, then square roots of 60 digits.
extended_norm is fast: 64-bit mantissas, where the machine has them.
"""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import settings

quick = settings(max_examples=100, deadline=None, database=None, derandomize=True)
thorough = settings(quick, max_examples=250)
needs_extended = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="long double is no longer than double here"
)


def _mpf(value):
    return mpmath.mpf(value.numerator) / value.denominator


def _reciprocal_root(value):
    return 1 / mpmath.sqrt(_mpf(value)) if value else mpmath.nan


def exact_stats(row, eps=1e-5, kind="layer"):
    """mean, var and rstd of one finite row, each rounded once; rstd is NaN where var + eps is 0."""
    values = [Fraction(float(v)) for v in row]
    mean = sum(values) / len(values)
    centred = values if kind == "rms" else [v - mean for v in values]
    var = sum(v * v for v in centred) / len(values)
    with mpmath.workdps(60):
        rstd = _reciprocal_root(var + Fraction(float(eps)))
        return float(_mpf(mean)), float(_mpf(var)), float(rstd)


def exact_norm(row, eps=1e-5, kind="layer", gamma=None, beta=None):
    """The norm of one finite row, each element rounded once to float64."""
    values = [Fraction(float(v)) for v in row]
    mean = sum(values) / len(values) if kind == "layer" else 0
    centred = [v - mean for v in values]
    var = sum(v * v for v in centred) / len(values)
    gamma = [1] * len(values) if gamma is None else gamma
    beta = [0] * len(values) if beta is None else beta
    with mpmath.workdps(60):
        rstd = _reciprocal_root(var + Fraction(float(eps)))
        return np.array(
            [
                float(_mpf(c) * rstd * float(g) + float(b))
                for c, g, b in zip(centred, gamma, beta, strict=True)
            ]
        )


def exact_norms(x, eps=1e-5, kind="layer", gamma=None, beta=None):
    return np.array([exact_norm(row, eps, kind, gamma, beta) for row in x])


def extended_norm(x, eps=1e-5, kind="layer", gamma=1, beta=0):
    """The norm of finite rows x (r, d), unrounded.

    The mean itself rounds, by more than the result may be wrong where the mean is large against the
    spread; the centred row is exact, so its own mean is subtracted again.
    """
    centred = np.asarray(x).astype(np.float64).astype(np.longdouble)
    if kind == "layer":
        for _ in range(3):
            centred = centred - centred.mean(axis=1, keepdims=True)
    var = (centred * centred).mean(axis=1, keepdims=True)
    return centred / np.sqrt(var + np.longdouble(eps)) * gamma + beta


def exact_gradients(x, dy, eps=1e-5, kind="layer", gamma=None):
    """dx, dgamma and dbeta of few finite rows, from differences of the forward formula in 90 digits."""
    rows, width = x.shape
    gamma = [1.0] * width if gamma is None else gamma
    with mpmath.workdps(90):
        h = mpmath.mpf(10) ** -25
        x = [[mpmath.mpf(float(v)) for v in row] for row in x]
        g = [mpmath.mpf(float(v)) for v in gamma]
        dy = [[mpmath.mpf(float(v)) for v in row] for row in dy]

        def loss(row, upstream, g):
            mean = mpmath.fsum(row) / width if kind == "layer" else 0
            centred = [v - mean for v in row]
            root = mpmath.sqrt(mpmath.fsum(c * c for c in centred) / width + mpmath.mpf(eps))
            return mpmath.fsum(u * c / root * w for u, c, w in zip(upstream, centred, g, strict=True))

        def moved(values, j, by):
            return [*values[:j], values[j] + by, *values[j + 1 :]]

        def slope(function):
            return (function(h) - function(-h)) / (2 * h)

        dx = [
            [float(slope(lambda t: loss(moved(r, j, t), u, g))) for j in range(width)]  # noqa: B023
            for r, u in zip(x, dy, strict=True)
        ]
        dgamma = [
            float(
                mpmath.fsum(
                    slope(lambda t: loss(r, u, moved(g, j, t)))  # noqa: B023
                    for r, u in zip(x, dy, strict=True)
                )
            )
            for j in range(width)
        ]
        dbeta = [float(mpmath.fsum(column)) for column in zip(*dy, strict=True)] or [0.0] * width
    return np.array(dx).reshape(rows, width), np.array(dgamma), np.array(dbeta)


def extended_gradients(x, dy, eps=1e-5, kind="layer", gamma=1):
    """dx, dgamma and dbeta of finite rows x and dy (r, d), in long double."""
    xhat = extended_norm(x, eps, kind)
    upstream = np.asarray(dy).astype(np.float64).astype(np.longdouble)
    wide = np.asarray(x).astype(np.float64).astype(np.longdouble)
    if kind == "layer":
        for _ in range(3):
            wide = wide - wide.mean(axis=1, keepdims=True)
    var = (wide * wide).mean(axis=1, keepdims=True)
    g = upstream * gamma
    dx = g - xhat * (g * xhat).mean(axis=1, keepdims=True)
    if kind == "layer":
        dx = dx - g.mean(axis=1, keepdims=True)
    return dx / np.sqrt(var + np.longdouble(eps)), (upstream * xhat).sum(axis=0), upstream.sum(axis=0)


def ulp_errors(y, truth):
    """|y - truth| in units of float64's last place at max(1, |truth|)."""
    return np.abs(y - truth) / np.spacing(np.maximum(1, np.abs(truth).astype(np.float64)))


def assert_same_bits(y, expected):
    __tracebackhide__ = True
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    unsigned = f"u{y.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(y).view(unsigned), np.ascontiguousarray(expected).view(unsigned)
    )


def _one_large_feature(normal):
    normal[:, normal.shape[1] // 3] *= 3000
    return normal


DISTRIBUTIONS = {
    "normal": lambda normal: normal,
    "mean 1e4": lambda normal: 1e4 + normal,
    "mean 1e6, sd 0.1": lambda normal: 1e6 + 0.1 * normal,
    "one feature x 3000": _one_large_feature,
    "x 1e-4": lambda normal: 1e-4 * normal,
    "x 1e20": lambda normal: 1e20 * normal,
}

ROWS = {
    **DISTRIBUTIONS,
    "constant": lambda normal: normal[:, :1] + 0 * normal,
    "zero": np.zeros_like,
    "minus zero": lambda normal: np.full_like(normal, -0.0),
    "zeros of both signs": lambda normal: np.copysign(0, normal),
    "almost constant": lambda normal: 1 + 2.0**-52 * (normal > 1),
    "sd of 2**-43 means": lambda normal: 1 + 2.0**-43 * normal,
    "sd of 2**-40 means": lambda normal: 1 + 2.0**-40 * normal,
    "x 1e200": lambda normal: 1e200 * normal,
    "x 1e-157": lambda normal: 1e-157 * normal,
    "x 1e-320": lambda normal: 1e-320 * normal,
    "at the largest": lambda normal: np.copysign(1.7e308, normal),
    "NaN": lambda normal: np.where(normal == normal.max(axis=1, keepdims=True), np.nan, normal),
    "inf": lambda normal: np.where(normal == normal.max(axis=1, keepdims=True), np.inf, normal),
    "-inf": lambda normal: np.where(normal == normal.min(axis=1, keepdims=True), -np.inf, normal),
}
NONFINITE = ("NaN", "inf", "-inf")
FINITE_ROWS = [name for name in ROWS if name not in NONFINITE]


def rows_like(name, rows, width, seed=0):
    """Rows (rows, width) float64 of ROWS[name]."""
    return ROWS[name](np.random.default_rng([seed, width]).standard_normal((rows, width)))
