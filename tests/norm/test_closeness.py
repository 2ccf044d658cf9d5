import ml_dtypes
import numpy as np
import pytest

from layernorm_cli.errors import UsageError
from layernorm_cli.norm.closeness import closeness, epsilon, ulp
from layernorm_cli.norm.dtypes import DTYPES

FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind == "f"]


def numpys(dtype):
    return np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_ulp_is_the_distance_to_the_next_number(dtype):
    kind = numpys(dtype)
    info = ml_dtypes.finfo(kind)
    assert epsilon(dtype) == float(info.eps)
    values = np.array([0, 1, 1.5, 2, 0.1, -3.7, float(info.tiny), float(info.tiny) / 2]).astype(kind)
    above = np.nextafter(np.abs(values), np.array(info.max, kind)).astype("f8")
    np.testing.assert_array_equal(ulp(values.astype("f8"), dtype), above - np.abs(values).astype("f8"))


@pytest.mark.parametrize(
    ("x", "y", "coarser"),
    [
        ("float32", "float32", "float32"),
        ("float32", "float64", "float32"),
        ("float64", "bfloat16", "bfloat16"),
        ("float16", "float32", "float16"),
        ("int32", "float32", "float32"),
        ("int32", "float64", "float64"),
        ("int32", "int32", "float64"),
        ("float8_e5m2", "float32", "bfloat16"),
        ("float32", "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_the_coarser_dtype_counts(x, y, coarser):
    close = closeness(DTYPES[x], DTYPES[y], 64)
    assert close.unit == epsilon(DTYPES[coarser])
    assert not close.given
    assert 2 * close.unit <= close.rtol <= 6 * close.unit


def test_wide_rows_may_be_further_off():
    narrow, wide = (closeness(DTYPES["float32"], DTYPES["float32"], d) for d in (64, 20_000))
    assert 20 * narrow.rtol < wide.rtol < 100 * narrow.rtol


def test_the_users_bound_is_numpys():
    close = closeness(DTYPES["float32"], DTYPES["float32"], 8, rtol=0.1)
    assert (close.rtol, close.atol, close.given) == (0.1, 0, True)
    y = np.array([0.0, -2, 10])
    np.testing.assert_allclose(close.bound(y, 100 + y), [0, 0.2, 1])
    close = closeness(DTYPES["float32"], DTYPES["float32"], 8, atol=0.5)
    np.testing.assert_array_equal(close.bound(y, y), [0.5] * 3)
    assert (close.default(np.ones(1)) < 1e-6).all()


def test_eps_as_a_float32_number_is_allowed_for():
    close = closeness(DTYPES["float64"], DTYPES["float64"], 8)
    terms = np.ones(1)
    assert close.default(terms, 1.0) > 2.0**-25 > 1e6 * close.default(terms)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_refused(name, value):
    with pytest.raises(UsageError, match=name):
        closeness(DTYPES["float32"], DTYPES["float32"], 8, **{name: value})
