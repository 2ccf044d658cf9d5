"""The suite fails on engines that are wrong on purpose, and on no other."""

import numpy as np
import pytest
from norm.oracle import needs_extended

from layernorm_cli.backends import ENGINES, load_prepare
from layernorm_cli.norm.forward import RowStats
from layernorm_cli.norm.rounding import round_into

from .suite import failures, suite_of

pytestmark = needs_extended

FOUND_BY_ANY = (
    "unbiased variance",
    "eps outside the root",
    "axis 0",
    "gamma dropped",
    "beta dropped",
    "float32 statistics",
)
FAULTS = (*FOUND_BY_ANY, "E[x^2] - E[x]^2")


def formula(fault):
    """The norm as on paper, in long double, but for one fault."""

    def prepare(norm, width, device):
        gamma = 1 if norm.gamma is None or fault == "gamma dropped" else norm.gamma
        beta = 0 if norm.beta is None or fault == "beta dropped" else norm.beta
        axis = 0 if fault == "axis 0" else 1
        divisor = max(1, width - 1) if fault == "unbiased variance" else width
        digits = np.float32 if fault == "float32 statistics" else np.longdouble

        def kernel(x, y):
            if len(x) == 0:
                empty = np.empty(0)
                return RowStats(empty, empty, empty, empty.astype(bool), empty.astype(bool))
            with np.errstate(all="ignore"):
                xhat, stats = standardize(x.astype(np.float64).astype(digits))
                if y is not None:
                    round_into((xhat * gamma + beta).astype(np.float64), y)
            return stats

        def standardize(x):
            finite = np.isfinite(x).all(axis=1)
            constant = (x == x[:, :1]).all(axis=1)
            mean = x.mean(axis=axis, keepdims=True)
            centred = x
            if norm.kind == "layer":
                centred = x - mean
                for _ in range(2):
                    residual = centred.mean(axis=axis, keepdims=True)
                    centred, mean = centred - residual, mean + residual
                if axis == 1:
                    centred[constant & finite] = 0
            var = (centred * centred).sum(axis=axis, keepdims=True) / divisor
            if fault == "E[x^2] - E[x]^2" and norm.kind == "layer":
                wide = x.astype(np.float64)
                var = (wide * wide).mean(axis=1, keepdims=True) - wide.mean(axis=1, keepdims=True) ** 2
            eps = x.dtype.type(norm.eps)
            rstd = 1 / (np.sqrt(var) + eps if fault == "eps outside the root" else np.sqrt(var + eps))
            xhat = centred * rstd
            xhat[~finite] = np.nan
            columns = [np.broadcast_to(part, (len(x), 1)) for part in (mean, var, rstd)] if axis else []
            columns = columns or [
                x.mean(1, keepdims=True),
                x.var(1, keepdims=True),
                rstd.mean() + 0 * x[:, :1],
            ]
            mean, var, rstd = (column[:, 0].astype(np.float64) for column in columns)
            var[~finite] = rstd[~finite] = np.nan
            return xhat, RowStats(mean, var, rstd, constant & finite, ~finite)

        return kernel

    return prepare


def suite(fault, name):
    return suite_of(name, ENGINES[name], formula(fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_exact_suite_finds(fault):
    assert next(failures(suite(fault, "numpy"), "test_values"), None)


@pytest.mark.parametrize("fault", FOUND_BY_ANY)
def test_suite_of_other_engines_finds(fault):
    assert next(failures(suite(fault, "torch"), "test_values"), None)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_formula_without_fault_passes(name):
    assert list(failures(suite(None, name))) == []


def test_reference_passes():
    prepare = load_prepare("numpy", ENGINES["numpy"], "layer", "float64", "cpu")
    assert list(failures(suite_of("numpy", ENGINES["numpy"], prepare))) == []
