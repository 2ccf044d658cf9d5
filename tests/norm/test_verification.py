import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from layernorm_cli import Verdict, layer_norm, verify
from layernorm_cli.errors import UsageError
from layernorm_cli.norm.rounding import round_into

from .oracle import quick

FLOATS = (
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
)
rng = np.random.default_rng(0)


@quick
@given(data=st.data())
def test_what_apply_makes_is_right(data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    x = data.draw(arrays(np.float64, shape, elements=st.floats()))
    with np.errstate(all="ignore"):
        x = x.astype(data.draw(st.sampled_from(FLOATS)))
    parameters = st.none() | arrays(np.float64, shape[1:], elements=st.floats(-1e3, 1e3))
    gamma, beta = data.draw(parameters), data.draw(parameters)
    eps = data.draw(st.sampled_from([0, 1e-300, 1e-12, 1e-5, 1.0]))
    kind = data.draw(st.sampled_from(["layer", "rms"]))
    y = np.empty(shape, data.draw(st.sampled_from(FLOATS)))
    round_into(layer_norm(x, gamma, beta, eps, kind=kind), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = verify(x, y, gamma, beta, eps, kind=kind)
    assert verdict.match
    assert (verdict.exact_fraction, verdict.max_ulp_error, verdict.best) == (1, 0, None)


def test_the_verdict():
    x = rng.standard_normal((2, 3, 4)).astype("f4")
    y = layer_norm(x, eps=0.5).astype("f4")
    y[1, 2, 3] += 1
    verdict = verify(x, y, eps=0.5)
    assert isinstance(verdict, Verdict)
    assert (verdict.match, verdict.kind, verdict.eps) == (False, "layer", 0.5)
    assert (verdict.shape, verdict.rows, verdict.dtype) == ((2, 3, 4), 6, "float32")
    assert (verdict.wrong_elements, verdict.wrong_rows) == (1, 1)
    assert verdict.max_abs_error == pytest.approx(1, rel=1e-6)
    assert verdict.exact_fraction == 23 / 24
    assert verdict.worst_rows[0] == ((1, 2), verdict.max_abs_error)
    assert verdict.worst_features[0] == ((3,), verdict.max_abs_error)
    assert verdict.rtol < 1e-6


def test_axes():
    x = rng.standard_normal((3, 4, 5))
    y = layer_norm(x, axis=-2)
    assert verify(x, y, axis=1).match
    assert not verify(x, y).match
    y[2, 3, 1] += 1
    verdict = verify(x, y, axis=1)
    assert (verdict.worst_rows[0].row, verdict.worst_features[0].feature) == ((2,), (3, 1))
    assert verify(x[0, 0], layer_norm(x[0, 0])).match


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_integers(dtype):
    x = rng.integers(0, 2, (9, 8)).astype(dtype)
    assert verify(x, layer_norm(x)).match
    assert verify(x, layer_norm(x, eps=1e-3)).best == "eps 0.001 instead of 1e-05"


def test_memory_order():
    x = rng.standard_normal((30, 20))
    for made in (np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], x.astype(">f8")):
        assert verify(made, np.asfortranarray(layer_norm(x))).match


def test_tolerances_of_the_user():
    x = rng.standard_normal((30, 20)).astype("f4")
    y = layer_norm(x).astype("f4") + np.float32(1e-4)
    assert not verify(x, y).match
    assert verify(x, y, atol=1.1e-4).match
    assert not verify(x, y, rtol=1e-4).match
    strict = verify(x, layer_norm(x).astype("f4"), rtol=0, atol=0)
    assert not strict.match
    assert strict.best is None
    assert "only the tolerance asked for is stricter" in strict.notes[0]
    wrong = verify(x, layer_norm(x, eps=1e-3).astype("f4"), rtol=0, atol=0)
    assert wrong.best == "eps 0.001 instead of 1e-05"


@pytest.mark.parametrize("shape", [(4, 1), (1, 1), (4, 2), (5, 3), (1, 8), (3,)])
@pytest.mark.parametrize("scale", [1e-4, 1, 1e20, 1e200])
@pytest.mark.parametrize("mean", [0, 1e4])
def test_few_features_and_odd_scales(shape, scale, mean):
    x = mean + scale * rng.standard_normal(shape)
    assert verify(x, layer_norm(x)).match
    assert verify(x, x).best == "not normalized"
    twice = verify(x, 2 * layer_norm(x))
    assert twice.match == (shape[-1] == 1)
    assert twice.best is None or "eps" in twice.best


def test_eps_within_the_tolerance_is_noted():
    x = 300 * np.random.default_rng(0).standard_normal((400, 30)).astype("f4")
    verdict = verify(x, layer_norm(x, eps=1e-2).astype("f4"), eps=0.03)
    assert verdict.match
    assert "eps" in verdict.notes[0]


@pytest.mark.parametrize(
    ("arguments", "options", "mention"),
    [
        (([[1, 2]], [[1, 2, 3]]), {}, "y: has shape"),
        (([[1, 2]], [[1], [2]]), {}, "y: has shape"),
        (([[1, 2]], [[1, 2]], [1]), {}, "gamma"),
        (([[1, 2]], [[1, 2]]), {"residual": [1, 2]}, "residual"),
        (([[1, 2]], [["a", "b"]]), {}, "<U1"),
        (([[1, 2]], [[1, 2]]), {"rtol": -1.0}, "rtol"),
        (([[1, 2]], [[1, 2]]), {"eps": -1.0}, "eps"),
        (([[1, 2]], [[1, 2]]), {"kind": "batch"}, "batch"),
        (([[1, 2]], [[1, 2]]), {"axis": 2}, "axis 2"),
        ((1.0, 1.0), {}, "0-d"),
    ],
)
def test_refused(arguments, options, mention):
    with pytest.raises(UsageError, match=mention):
        verify(*arguments, **options)
