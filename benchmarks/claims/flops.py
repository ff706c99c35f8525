"""Counts what a graph computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx

_PRODUCTS = {"Gemm", "MatMul", "MatMulInteger", "QGemm", "QLinearMatMul", "FusedMatMul"}
_FREE = {
    "Gather", "Reshape", "Concat", "Cast", "Identity", "Transpose", "Squeeze", "Unsqueeze", "Shape", "Expand", "Slice",
    "Split", "Flatten", "Constant", "ConstantOfShape", "Where", "QuantizeLinear", "DequantizeLinear",
    "DynamicQuantizeLinear",
}  # fmt: skip


# A matrix product of n by k by m counts 2nkm, whatever the width of its numbers; an elementwise operator counts one per
# element; moving data counts nothing.
def count_flops(network: onnx.ModelProto) -> int:
    """Counts floating-point (or integer) operations for a batch of one row. Nodes of unknown shape count nothing."""
    model = deepcopy(network)
    for tensor in (*model.graph.input, *model.graph.output):
        for dim in tensor.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 1
    del model.graph.value_info[:]
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, Sequence[int]] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        shapes[info.name] = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
    return sum(_cost(node, shapes) for node in graph.node)


def _cost(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]]) -> int:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type in _FREE or not node.output:
        return 0
    made = shapes.get(node.output[0], ())
    size = int(np.prod(made)) if made else 0
    if node.op_type in _PRODUCTS:
        left = shapes.get(node.input[0], ())
        if not left:
            return 0
        inner = left[-2] if "transA" in attributes and attributes["transA"].i else left[-1]
        return 2 * size * int(inner)
    return size
