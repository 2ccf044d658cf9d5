"""Every variant made by other code, and named first; pairs of them; and what must not be named."""

import ml_dtypes
import numpy as np
import pytest

from layernorm_cli import verify
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.norm.variants import (
    COMPUTED,
    VARIANTS,
    Rows,
    Stated,
    predict,
    round_to,
    stated_recipe,
)

SHAPES = [(40, 6), (3, 7, 16), (2, 3, 4, 33)]
EPS = 1e-5


class Case:
    """Rows of unequal spread, offset features and parameters, and what mistakes make of them."""

    def __init__(self, shape, dtype=np.float64, mean=0.5, sd=1.0):
        rng = np.random.default_rng(shape[-1])
        width = shape[-1]
        spread = sd * np.exp(rng.standard_normal((*shape[:-1], 1)))
        x = mean + spread * (rng.standard_normal(shape) + 0.3 * rng.standard_normal(width))
        self.x = x.astype(dtype)
        self.residual = (rng.standard_normal(shape) * sd).astype(dtype)
        self.gamma = (1 + 0.3 * rng.standard_normal(width)).astype(dtype)
        self.beta = (0.3 * rng.standard_normal(width)).astype(dtype)

    def norm(self, eps=EPS, less=0, outside=False, x=None):
        """As on paper, in long double."""
        x = (self.x if x is None else x).astype(np.longdouble)
        centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
        var = (centred**2).sum(-1, keepdims=True) / (x.shape[-1] - less)
        eps = np.longdouble(eps)
        return centred / (np.sqrt(var) + eps if outside else np.sqrt(var + eps))

    def mean_square_norm(self):
        x = self.x.astype(np.longdouble)
        return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + np.longdouble(EPS))

    def across(self, axes):
        x = self.x.astype(np.longdouble)
        mean = x.sum(axes, keepdims=True) / np.prod([x.shape[a] for a in axes])
        return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + np.longdouble(EPS))

    def rounded_statistics(self, dtype):
        mean = rounded(self.x.mean(-1, keepdims=True), dtype)
        return (self.x - mean) / np.sqrt(rounded(self.x.var(-1, keepdims=True), dtype) + EPS)

    def affine(self, xhat, gamma=None, beta=None):
        gamma = self.gamma if gamma is None else gamma
        beta = self.beta if beta is None else beta
        return xhat * gamma + beta

    def verify(self, y, dtype=None, **options):
        y = np.asarray(y).astype(dtype or self.x.dtype)
        return verify(self.x, y, self.gamma, self.beta, EPS, **options)


def rounded(y, dtype):
    return y.astype(np.float64).astype(dtype).astype(np.float64)


MISTAKES = {
    "gamma left out": lambda c: c.norm() + c.beta,
    "beta left out": lambda c: c.norm() * c.gamma,
    "gamma and beta left out": lambda c: c.norm(),
    "beta added before gamma": lambda c: (c.norm() + c.beta) * c.gamma,
    "gamma + 1 (an offset that was not stated)": lambda c: c.affine(c.norm(), c.gamma + 1),
    "gamma and beta swapped": lambda c: c.affine(c.norm(), c.beta, c.gamma),
    "gamma and beta rounded to bfloat16": lambda c: c.affine(
        c.norm(), *(rounded(p, ml_dtypes.bfloat16) for p in (c.gamma, c.beta))
    ),
    "gamma and beta rounded to float16": lambda c: c.affine(
        c.norm(), *(rounded(p, np.float16) for p in (c.gamma, c.beta))
    ),
    "unbiased variance (d - 1)": lambda c: c.affine(c.norm(less=1)),
    "eps outside the root (std + eps)": lambda c: c.affine(c.norm(outside=True)),
    "eps outside the root, unbiased variance (d - 1)": lambda c: c.affine(c.norm(outside=True, less=1)),
    "eps missing": lambda c: c.affine(c.norm(0)),
    "eps 1e-12 instead of 1e-05": lambda c: c.affine(c.norm(1e-12)),
    "eps 1e-08 instead of 1e-05": lambda c: c.affine(c.norm(1e-8)),
    "eps 1e-06 instead of 1e-05": lambda c: c.affine(c.norm(1e-6)),
    "eps 0.001 instead of 1e-05": lambda c: c.affine(c.norm(1e-3)),
    "eps 0.0375 instead of 1e-05": lambda c: c.affine(c.norm(0.0375)),
    "RMS norm (mean not removed)": lambda c: c.affine(c.mean_square_norm()),
    "mean removed, but not scaled": lambda c: c.affine(c.x - c.x.mean(-1, keepdims=True)),
    "not normalized": lambda c: c.affine(c.x),
    "not normalized, gamma and beta left out": lambda c: c.x,
    "pre-norm: x + LN(x)": lambda c: c.x + c.affine(c.norm()),
    "normalized over axis 0 (batch norm)": lambda c: c.affine(c.across(tuple(range(c.x.ndim - 1)))),
    "normalized over axis 0 alone": lambda c: c.affine(c.across((0,))),
    "normalized over all axes": lambda c: c.affine(c.across(tuple(range(c.x.ndim)))),
    "statistics in float16": lambda c: c.affine(c.rounded_statistics(np.float16)),
    "statistics in bfloat16": lambda c: c.affine(c.rounded_statistics(ml_dtypes.bfloat16)),
    "statistics in float32": lambda c: c.affine(c.rounded_statistics(np.float32)),
    "output rounded to bfloat16": lambda c: rounded(c.affine(c.norm()), ml_dtypes.bfloat16),
    "output rounded to float16": lambda c: rounded(c.affine(c.norm()), np.float16),
    "output rounded to float32": lambda c: rounded(c.affine(c.norm()), np.float32),
}
WITH_RESIDUAL = {
    "residual left out": lambda c: c.affine(c.norm()),
    "residual added after the norm, not before it": lambda c: c.affine(c.norm()) + c.residual,
    "sum added after the norm once more": lambda c: (
        c.affine(c.norm(x=c.x + c.residual)) + c.x + c.residual
    ),
    "pre-norm: x + LN(x)": lambda c: c.x + c.affine(c.norm()),
    "unbiased variance (d - 1)": lambda c: c.affine(c.norm(less=1, x=c.x + c.residual)),
}
ELSEWHERE = {  # each has a test of its own
    "another eps",
    "the offset of gamma forgotten",
    "layer norm (mean removed)",
    "output cast to integers",
    "E[x^2] - E[x]^2 in float32",
}


def test_every_variant_is_tested():
    made = {name.removesuffix(" instead of 1e-05") for name in {**MISTAKES, **WITH_RESIDUAL}}
    assert {variant.name for variant in VARIANTS} - made - ELSEWHERE == {"eps 1e-05"}
    assert len({variant.name for variant in (*VARIANTS, *COMPUTED)}) == len(VARIANTS) + len(COMPUTED)


def shapes_of(name):
    return [shape for shape in SHAPES if name != "normalized over axis 0 alone" or len(shape) > 2]


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name in MISTAKES for shape in shapes_of(name)]
)
def test_named_first(name, shape):
    case = Case(shape)
    verdict = case.verify(MISTAKES[name](case))
    assert not verdict.match
    assert (verdict.best, verdict.equally_good) == (name, ())
    first, *others = verdict.variants
    assert (first.variant, first.explains) == (name, True)
    assert all(first.max_abs_error < other.max_abs_error for other in others if not other.explains)


IN_FLOAT32 = [
    name
    for name in MISTAKES
    if name not in ("eps missing", "eps 1e-12 instead of 1e-05") and not name.endswith("float32")
]


@pytest.mark.parametrize("shape", [(5, 9, 33)])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_named_first_in_float32(name, shape):
    if name == "normalized over axis 0 alone" and len(shape) == 2:
        name = "normalized over axis 0 (batch norm)"
    case = Case(shape, np.float32, sd=0.1)
    verdict = case.verify(MISTAKES[name](case))
    assert (verdict.match, verdict.best) == (False, name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_with_a_residual(name, shape):
    case = Case(shape)
    verdict = case.verify(WITH_RESIDUAL[name](case), residual=case.residual)
    assert (verdict.match, verdict.best, verdict.equally_good) == (False, name, ())


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_another_kind(shape):
    case = Case(shape)
    verdict = case.verify(case.affine(case.norm()), kind="rms")
    assert (verdict.match, verdict.best) == (False, "layer norm (mean removed)")
    verdict = case.verify(case.affine(case.mean_square_norm(), case.gamma), kind="rms", gamma_offset=1)
    assert verdict.best == "the offset of gamma forgotten"
    assert case.verify(case.affine(case.mean_square_norm(), case.gamma + 1), kind="rms").best == (
        "gamma + 1 (an offset that was not stated)"
    )


@pytest.mark.parametrize("shape", [(200, 24), (3, 50, 64), (64, 768)])
@pytest.mark.parametrize("mean", [300, 2000])
def test_squares_in_float32(shape, mean):
    case = Case(shape, np.float32, mean=mean)
    x = case.x
    with np.errstate(invalid="ignore"):
        var = np.mean(x * x, -1, keepdims=True) - np.mean(x, -1, keepdims=True) ** 2
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(var + np.float32(EPS)) * case.gamma + case.beta
    assert case.verify(y).best == "E[x^2] - E[x]^2 in float32"
    twice = 2 * (y - case.beta) + case.beta
    assert case.verify(twice).best is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(30, 8), (4, 9, 64), (20, 300)])
def test_statistics_of_short_arithmetic(dtype, shape):
    case = Case(shape, np.float32)
    short = case.x.astype(dtype)
    mean = short.mean(-1, keepdims=True)
    std = short.std(-1, keepdims=True)
    y = (case.x - mean.astype("f4")) / (std.astype("f4")) * case.gamma + case.beta
    assert verify(case.x, y, case.gamma, case.beta, 0).best == f"statistics in {np.dtype(dtype).name}"


def test_statistics_that_overflow():
    case = Case((20, 32), np.float32, sd=100)
    short = case.x.astype(np.float16)
    with np.errstate(over="ignore"):
        var = np.square(short - short.mean(-1, keepdims=True)).mean(-1, keepdims=True)
    assert 0 < np.isinf(var).mean() < 1
    y = (case.x - short.mean(-1, keepdims=True)) / np.sqrt(
        var + np.float16(EPS)
    ) * case.gamma + case.beta
    assert case.verify(y).best == "statistics in float16"


@pytest.mark.parametrize("shape", SHAPES)
def test_computed_in_a_short_dtype(shape):
    case = Case(shape, np.float32, mean=0)
    x, gamma, beta = (a.astype(np.float16) for a in (case.x, case.gamma, case.beta))
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.float16(EPS))
    verdict = case.verify(y * gamma + beta)
    assert verdict.best == "computed in float16"


@pytest.mark.parametrize("round_off", [np.trunc, np.rint])
def test_cast_to_integers(round_off):
    case = Case((20, 9))
    y = round_off(case.affine(case.norm()).astype(np.float64)).astype(np.int32)
    assert verify(case.x, y, case.gamma, case.beta).best == "output cast to integers"


PAIRS = {
    "gamma left out, and unbiased variance (d - 1)": lambda c: c.norm(less=1) + c.beta,
    "beta left out, and eps 0.001 instead of 1e-05": lambda c: c.norm(1e-3) * c.gamma,
    "unbiased variance (d - 1), and eps 1e-12 instead of 1e-05": lambda c: c.affine(
        c.norm(1e-12, less=1)
    ),
    "unbiased variance (d - 1), and output rounded to bfloat16": lambda c: rounded(
        c.affine(c.norm(less=1)), ml_dtypes.bfloat16
    ),
    "beta left out, and RMS norm (mean not removed)": lambda c: c.mean_square_norm() * c.gamma,
    "gamma left out, and normalized over axis 0 (batch norm)": lambda c: (
        c.across(tuple(range(c.x.ndim - 1))) + c.beta
    ),
    "beta added before gamma, and pre-norm: x + LN(x)": lambda c: c.x + (c.norm() + c.beta) * c.gamma,
    "gamma and beta swapped, and eps outside the root (std + eps)": lambda c: c.affine(
        c.norm(outside=True), c.beta, c.gamma
    ),
    "gamma left out, and eps 0.02 instead of 1e-05": lambda c: c.norm(0.02) + c.beta,
    "beta left out, and statistics in float16": lambda c: c.rounded_statistics(np.float16) * c.gamma,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, shape):
    case = Case(shape)
    verdict = case.verify(PAIRS[name](case))
    assert (verdict.match, verdict.best, verdict.equally_good) == (False, name, ())


@pytest.mark.parametrize(("shape", "dtype"), [((40, 6), np.float32), ((3, 7, 16), np.float64)])
def test_what_is_nothing_known_is_not_named(shape, dtype):
    case = Case(shape, dtype)
    y = case.affine(case.norm()).astype(np.float64)
    rng = np.random.default_rng(0)
    others = (
        1.0371 * y,
        y + 0.0123,
        y[..., ::-1],
        np.tanh(y),
        y + 0.01 * rng.standard_normal(shape),
        rng.standard_normal(shape),
        y * (1 + 0.001 * rng.standard_normal((*shape[:-1], 1))),
    )
    for other in others:
        verdict = case.verify(other)
        assert (verdict.match, verdict.best) == (False, None)
        assert not any(one.explains for one in verdict.variants)


def test_ties_are_told():
    case = Case((30, 8), np.float32)
    verdict = case.verify(case.affine(case.norm(0)))
    assert {verdict.best, *verdict.equally_good} == {"eps missing", "eps 1e-12 instead of 1e-05"}
    verdict = verify(case.x, case.norm().astype("f4"), case.gamma, 0 * case.beta)
    assert (verdict.best, verdict.equally_good) == ("gamma left out", ())


def test_a_prediction_is_the_norm():
    case = Case((9, 5))
    stated = Stated("layer", EPS, case.gamma, case.beta, 0, False, DTYPES["float64"])
    made = predict(stated_recipe(stated), Rows(case.x, None, case.x, {}), stated, 2.0**-52)
    np.testing.assert_allclose(made.y, case.affine(case.norm()).astype("f8"), 1e-13, 1e-13)
    assert (np.abs(made.y) <= made.terms).all()


def test_round_to():
    values = np.array([1.0, 1 + 2.0**-9, 3.1])
    np.testing.assert_array_equal(
        round_to(values, DTYPES["bfloat16"]), values.astype(ml_dtypes.bfloat16).astype("f8")
    )
