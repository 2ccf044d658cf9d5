"""The ONNX project's own node tests of LayerNormalization and RMSNormalization, through the command.

Each engine's first case goes through the installed command, the others through the same main() here.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.onnx
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx.backend.test.case.node import (  # noqa: E402
    _NodeTestCases,
    layernormalization,  # noqa: F401  # fills _NodeTestCases
    rmsnormalization,  # noqa: F401
)

PREFIXES = {"test_layer_normalization_": "layer", "test_rms_normalization_": "rms"}
CASES = {
    case.name: case
    for case in _NodeTestCases
    if case.name.startswith(tuple(PREFIXES)) and "_expanded" not in case.name
}
NAMES = sorted(CASES)
TIGHTER = {"rtol": 1e-5, "atol": 1e-6}  # the expected values are computed in float32


@pytest.fixture(params=["numpy", "onnxruntime"])
def backend(request):
    return request.param


@pytest.fixture
def applied(backend, here, layernorm, main):
    """Applies a case; gives its y and its statistics, and what the case expects."""

    def run(name):
        case = CASES[name]
        ((x, *parameters), expected), *more = case.data_sets
        assert not more
        (node,) = case.model.graph.node
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        (kind,) = {kind for prefix, kind in PREFIXES.items() if name.startswith(prefix)}
        options = ["--kind", kind, "--axis", str(attributes.pop("axis", -1))]
        options += ["--eps", repr(float(np.float32(attributes.pop("epsilon", 1e-5))))]
        assert not attributes
        np.save("x.npy", x)
        for option, parameter in zip(("gamma", "beta"), parameters, strict=False):
            np.save(f"{option}.npy", parameter)
            options += [f"--{option}", f"{option}.npy"]
        outputs = ["-o", "y.npy", "--save-stats", "stats.safetensors"]
        program = layernorm if name == NAMES[0] else main
        done = program("apply", "x.npy", *options, *outputs, "--backend", backend)
        assert (done.code, done.err) == (0, "")
        return np.load("y.npy"), load_file("stats.safetensors"), expected, case

    return run


def test_all_cases_are_there():
    kinds = [kind for name in NAMES for prefix, kind in PREFIXES.items() if name.startswith(prefix)]
    assert kinds.count("layer") >= 19
    assert set(kinds) <= {"layer", "rms"}


@pytest.mark.parametrize("name", NAMES)
def test_node(name, backend, applied):
    y, stats, (expected, *others), case = applied(name)
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=case.rtol, atol=case.atol)
    if backend == "numpy":
        np.testing.assert_allclose(y, expected, **TIGHTER)
    for field, output in zip(("mean", "rstd"), others, strict=False):
        seen = stats[field].reshape(output.shape)
        np.testing.assert_allclose(seen, output, rtol=case.rtol, atol=case.atol)
        np.testing.assert_allclose(seen, output, **TIGHTER)
