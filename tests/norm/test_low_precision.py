"""A norm in a shorter dtype: against the same in scalars of that dtype, one by one."""

import ml_dtypes
import numpy as np
import pytest

from layernorm_cli.norm.arrays import layer_norm
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.norm.low_precision import norm_in_dtype
from layernorm_cli.norm.spec import make_norm

from .oracle import rows_like

SCALARS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def in_dtype(row, dtype, eps=1e-5, kind="layer", gamma=None, beta=None):
    row = np.asarray(row, float)
    y = layer_norm(row, gamma, beta, eps, kind=kind)
    return norm_in_dtype(row, make_norm(kind, eps, gamma, beta), y, DTYPES[dtype])


def in_scalars(row, dtype, eps, kind, gamma, beta):
    """var and y; each operation on two scalars of the dtype, which rounds its result."""
    scalar = SCALARS[dtype]

    def total(values):
        if len(values) == 1:
            return values[0]
        half = len(values) // 2
        folded = [values[i] + values[half + i] for i in range(half)]
        if len(values) % 2:
            folded[0] = folded[0] + values[-1]
        return total(folded)

    def mean(values):
        return scalar(np.float64(total(values)) / len(values))

    x = [scalar(v) for v in row]
    if kind == "layer":
        middle = mean(x)
        x = [v - middle for v in x]
    var = mean([v * v for v in x])
    std = scalar(np.sqrt(np.float64(var + scalar(eps))))
    return var, [v / std * scalar(g) + scalar(b) for v, g, b in zip(x, gamma, beta, strict=True)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 333])
@pytest.mark.parametrize("name", ["normal", "mean 1e4", "one feature x 3000", "x 1e-4", "x 1e20"])
@pytest.mark.parametrize("dtype", SCALARS)
def test_as_in_scalars(dtype, name, width, kind):
    row = rows_like(name, 1, width)[0].astype(np.float32).astype(float)
    gamma, beta = rows_like("normal", 2, width, seed=1).astype(np.float32).astype(float)
    found = in_dtype(row, dtype, 1e-5, kind, gamma, beta)
    var, y = in_scalars(row, dtype, 1e-5, kind, gamma, beta)
    error = np.abs(np.array(y, float) - layer_norm(row, gamma, beta, kind=kind)).max()
    np.testing.assert_array_equal([found.var, found.max_abs_error], [float(var), error])
    assert found.eps == float(SCALARS[dtype](1e-5))


@pytest.mark.parametrize(
    ("dtype", "var", "eps", "survives"),
    [
        ("float16", 1, 1e-5, False),  # 1 + 2**-10 is the next number
        ("float16", 1, 2.0**-10, True),
        ("float16", 1, 2.0**-11, False),  # half way, to even
        ("float16", 1, 1.01 * 2.0**-11, True),
        ("float16", 2.0**-10, 1e-8, False),  # 0 in float16
        ("float16", 2.0**-10, 1e-5, True),
        ("bfloat16", 1, 1e-3, False),
        ("bfloat16", 1, 2.0**-7, True),
        ("bfloat16", 2.0**-20, 1e-8, True),
        ("float32", 1, 1e-7, True),
        ("float32", 1, 1e-8, False),
        ("float32", 1, 1e-50, False),
        ("float32", 1, 0, False),
        ("float32", 0, 1e-45, True),
    ],
)
def test_when_eps_survives(dtype, var, eps, survives):
    sd = var**0.5
    found = in_dtype([-sd, sd], dtype, eps)
    assert (found.var, found.eps_survives) == (var, survives)
    assert not found.var_overflows
    assert not found.var_underflows


@pytest.mark.parametrize(
    ("row", "dtype", "over", "under"),
    [
        ([-300, 300], "float16", True, False),  # 90,000 is beyond 65,504
        ([-200, 200], "float16", True, False),  # 40,000 is not, but the sum is
        ([-100, 100], "float16", False, False),
        ([-300, 300], "bfloat16", False, False),
        ([-1e5, 1e5], "float16", True, False),  # x itself is
        ([-1e20, 1e20], "bfloat16", True, False),
        ([-1e20, 1e20], "float32", True, False),
        ([-1e-4, 1e-4], "float16", False, True),
        ([-1e-3, 1e-3], "float16", False, False),
        ([1000, 1001], "bfloat16", False, True),  # one number there
        ([-1e-30, 1e-30], "float32", False, True),
        ([5, 5], "float32", False, False),
        ([np.nan, 5], "float32", False, False),
    ],
)
def test_var_out_of_range(row, dtype, over, under):
    found = in_dtype(row, dtype)
    assert (found.var_overflows, found.var_underflows) == (over, under)


def test_rms_of_a_constant_row_may_vanish_too():
    assert in_dtype([1e-5, 1e-5], "float16", kind="rms").var_underflows
    assert not in_dtype([0, 0], "float16", kind="rms").var_underflows


def test_errors_are_in_proportion_to_the_digits():
    row = rows_like("normal", 1, 768)[0]
    errors = {dtype: in_dtype(row, dtype).max_abs_error for dtype in SCALARS}
    assert errors["bfloat16"] > 4 * errors["float16"] > 4000 * errors["float32"] > 0
