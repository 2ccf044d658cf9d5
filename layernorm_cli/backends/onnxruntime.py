"""The onnxruntime engine: a model of one LayerNormalization node, or of RMS norm's few, on the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from ..norm.forward import Kernel
from ..norm.spec import Norm
from .foreign import foreign_kernel, parameters

__all__ = ["prepare"]

Array = npt.NDArray[np.generic]
OPSET = 17
IR_VERSION = 8


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker; a session is made for x's dtype when it is first seen."""
    sessions: dict[str, onnxruntime.InferenceSession] = {}

    def run(x: Array) -> Array:
        if x.dtype.name not in sessions:
            sessions[x.dtype.name] = _session(norm, width, x.dtype)
        (y,) = sessions[x.dtype.name].run(None, {"x": x})
        array: Array = y
        return array

    return foreign_kernel(norm, width, run)


def _session(norm: Norm, width: int, dtype: np.dtype[np.generic]) -> onnxruntime.InferenceSession:
    element = helper.np_dtype_to_tensor_dtype(dtype)
    gamma, beta = parameters(norm, width, dtype)
    constants = {"gamma": gamma, "beta": beta}
    if norm.kind == "layer":
        nodes = [
            helper.make_node(
                "LayerNormalization", ["x", "gamma", "beta"], ["y"], axis=-1, epsilon=norm.eps
            )
        ]
    else:
        constants["eps"] = np.array(norm.eps, dtype)
        nodes = [
            helper.make_node("Mul", ["x", "x"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["var"], axes=[-1], keepdims=1),
            helper.make_node("Add", ["var", "eps"], ["sum"]),
            helper.make_node("Sqrt", ["sum"], ["root"]),
            helper.make_node("Div", ["x", "root"], ["xhat"]),
            helper.make_node("Mul", ["xhat", "gamma"], ["scaled"]),
            helper.make_node("Add", ["scaled", "beta"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info("x", element, ["rows", width])],
        [helper.make_tensor_value_info("y", element, ["rows", width])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = helper.make_operatorsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the workers are the threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
