"""Stores embedding tables as 8-bit integers with a scale for each row: a quarter of the memory.

Only the rows that a request needs are dequantised; the rest of the network does not change.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

_FEWEST_ROWS = 64  # below this nothing is saved
_STEPS = 127.0


def to_int8_embeddings(network: onnx.ModelProto) -> onnx.ModelProto | str:
    """Returns the network with quantised tables, or the reason why that is impossible."""
    model = onnx.ModelProto()
    model.CopyFrom(network)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    nodes: list[onnx.NodeProto] = []
    made = 0
    for node in graph.node:
        table = weights.get(node.input[0]) if node.op_type == "Gather" and node.input else None
        if table is None or not _is_table(node, table) or len(users[table.name]) > 1:
            nodes.append(node)
            continue
        nodes += _small(graph, node, numpy_helper.to_array(table))
        graph.initializer.remove(table)
        made += 1
    if not made:
        return f"it has no embedding table of {_FEWEST_ROWS} rows or more"
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.checker.check_model(model)
    return model


def _is_table(node: onnx.NodeProto, table: onnx.TensorProto) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    large = len(table.dims) == 2 and table.dims[0] >= _FEWEST_ROWS
    return large and axis == 0 and table.data_type == onnx.TensorProto.FLOAT


def _small(graph: onnx.GraphProto, node: onnx.NodeProto, table: np.ndarray) -> list[onnx.NodeProto]:
    """Gathers integers and their rows' scales and multiplies them: approximately the same tensor."""
    name, codes, result = node.input[0], node.input[1], node.output[0]
    scale = np.abs(table).max(axis=1, keepdims=True) / _STEPS
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    small = np.rint(table / scale).astype(np.int8)
    graph.initializer.append(numpy_helper.from_array(small, f"{name}/int8"))
    graph.initializer.append(numpy_helper.from_array(scale, f"{name}/scale"))
    found = f"{result}/int8"
    return [
        helper.make_node("Gather", [f"{name}/int8", codes], [found], name=f"{node.name}/rows", axis=0),
        helper.make_node(
            "Cast", [found], [f"{result}/whole"], name=f"{node.name}/cast", to=onnx.TensorProto.FLOAT
        ),
        helper.make_node(
            "Gather", [f"{name}/scale", codes], [f"{result}/scale"], name=f"{node.name}/scales", axis=0
        ),
        helper.make_node("Mul", [f"{result}/whole", f"{result}/scale"], [result], name=node.name),
    ]
