"""Graphs of ONNX as other programs write them."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def linear(weights: np.ndarray) -> onnx.ModelProto:
    """x float32[batch, rows of the weights] times the weights."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", weights.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
