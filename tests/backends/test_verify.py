"""A right result of any engine, in any dtype, is never called wrong."""

import ml_dtypes
import numpy as np
import pytest

from layernorm_cli import layer_norm, verify
from layernorm_cli.backends import ENGINES, is_installed, load_prepare
from layernorm_cli.norm.spec import Norm

from .suite import FLOATS, numpy_dtype
from .test_engines import MARKERS

DISTRIBUTIONS = {
    "normal": lambda normal: normal,
    "mean 2": lambda normal: 2 + normal,
    "mean 100": lambda normal: 100 + normal,
    "mean 1e4": lambda normal: 1e4 + normal,
    "x 300": lambda normal: 300 * normal,
    "x 1e-4": lambda normal: 1e-4 * normal,
    "constant": lambda normal: normal[:, :1] + 0 * normal,
    "zero": np.zeros_like,
    "one feature x 3000": lambda normal: (
        normal * np.where(np.arange(normal.shape[1]) == normal.shape[1] // 3, 3000, 1)
    ),
    "a NaN": lambda normal: np.where(normal == normal.max(), np.nan, normal),
    "an inf": lambda normal: np.where(normal == normal.max(), np.inf, normal),
}
WIDTHS = (1, 3, 33, 769)


def marked(name, engine):
    marks = [pytest.mark.skipif(not is_installed(engine), reason=f"no {engine.package}")]
    if engine.extra:
        marks.append(getattr(pytest.mark, MARKERS.get(engine.extra, engine.extra)))
    return marks


CASES = [
    pytest.param(name, dtype, kind, marks=marked(name, engine))
    for name, engine in ENGINES.items()
    for dtype in FLOATS
    for kind in engine.kinds
    if dtype in engine.dtypes
]


@pytest.mark.parametrize(("name", "dtype", "kind"), CASES)
def test_never_called_wrong(name, dtype, kind):
    prepare = load_prepare(name, ENGINES[name], kind, dtype, "cpu")
    dtype = numpy_dtype(dtype)
    for width in WIDTHS:
        rng = np.random.default_rng(width)
        gamma = (1 + 0.3 * rng.standard_normal(width)).astype(dtype)
        beta = (0.3 * rng.standard_normal(width)).astype(dtype)
        kernel = prepare(Norm(kind, 1e-5, gamma.astype("f8"), beta.astype("f8")), width, "cpu")
        normal = rng.standard_normal((min(40, max(3, 4000 // width)), width))
        for distribution, make in DISTRIBUTIONS.items():
            with np.errstate(over="ignore"):
                x = make(normal).astype(dtype)
            y = np.empty_like(x)
            kernel(x, y)
            verdict = verify(x, y, gamma, beta, kind=kind)
            assert verdict.match, (width, distribution, verdict)


@pytest.mark.parametrize(("name", "dtype", "kind"), CASES)
def test_in_another_dtype(name, dtype, kind):
    prepare = load_prepare(name, ENGINES[name], kind, dtype, "cpu")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 33)).astype(numpy_dtype(dtype))
    gamma = np.linspace(0.5, 1.5, 33).astype(x.dtype)
    kernel = prepare(Norm(kind, 1e-5, gamma.astype("f8")), 33, "cpu")
    for out in FLOATS[:4]:
        y = np.empty(x.shape, numpy_dtype(out))
        kernel(x, y)
        assert verify(x, y, gamma, kind=kind).match, out


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_modules_are_right_and_mistaken_ones_are_not(dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.LayerNorm(96, eps=1e-3).to(getattr(torch, dtype))
    with torch.no_grad():
        module.weight += 0.3 * torch.randn(96)
        module.bias += 0.3 * torch.randn(96)
        x = (0.02 * torch.randn(7, 11, 96)).to(getattr(torch, dtype))
        arrays = [a.float().numpy() for a in (x, module(x), module.weight, module.bias)]
    x, y, gamma, beta = (a.astype(numpy_dtype(dtype)) for a in arrays)
    assert verify(x, y, gamma, beta, 1e-3).match
    verdict = verify(x, y, gamma, beta)
    assert (verdict.match, verdict.best) == (False, "eps 0.001 instead of 1e-05")
    assert verdict.inferred_eps == pytest.approx(1e-3, rel=0.01)


@pytest.mark.torch
def test_a_mistake_hidden_in_the_tolerance_shows_in_all_elements():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4096)).astype("f4")
    y = torch.nn.functional.layer_norm(torch.from_numpy(x), (4096,), eps=1e-6).numpy()
    verdict = verify(x, y)
    assert verdict.wrong_elements == 0
    assert (verdict.match, verdict.best) == (False, "eps 1e-06 instead of 1e-05")
    assert "within the tolerance" in verdict.notes[0]
    assert verify(x, y, eps=1e-6).match


@pytest.mark.torch
def test_rows_that_float32_loses():
    torch = pytest.importorskip("torch")
    x = (1e6 + 0.1 * np.random.default_rng(0).standard_normal((20, 768))).astype("f4")
    y = torch.nn.functional.layer_norm(torch.from_numpy(x), (768,)).numpy()
    verdict = verify(x, y)
    assert (verdict.match, verdict.best) == (False, None)
    assert verdict.max_abs_error > 0.1
    assert "20 of 20 rows have a mean so large" in verdict.notes[-1]
    assert verify(x, layer_norm(x).astype("f4")).match
    assert not verify(x, 0 * x).match


def test_integers_that_were_computed_in_float32():
    x = np.random.default_rng(0).integers(-50, 50, (30, 20))
    wide = x.astype("f4")
    y = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + np.float32(1e-5))
    assert verify(x, y).match
    assert verify(x, y.astype(ml_dtypes.bfloat16)).match
    assert verify(x, y.astype("f8")).best == "computed in float32"
