"""Builds the variants in which a network may be served, each from the same graph and the same training rows.

A variant that cannot be built here gives a reason, never a failure: the gate's report lists it with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from serin.export.convert.network import Network
from serin.export.convert.onnx2rtx import rtx_reason
from serin.export.convert.onnx2trt import missing_tensorrt
from serin.export.variants.fp16 import to_fp16
from serin.export.variants.int8 import to_int8, to_int8_dynamic
from serin.formats.wire import Array
from serin.scoring.session import Device

CALIBRATION_ROWS = 2048
MAX_ROWS = 1024
_ENGINES: Mapping[str, Device] = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
_FEWEST_ROWS = 64  # below this nothing is saved
_STEPS = 127.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A network's graph as it would be served.

    `steady`: a row's score does not depend on the other rows of its batch. `learned`: it was trained further after it
    was made, so its scores may differ and only its quality counts. `experimental`: it is measured, but never served.
    """

    name: str
    graph: onnx.ModelProto
    device: Device = "cpu"
    steady: bool = True
    learned: bool = False
    experimental: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    name: str
    reason: str


def build_variants(
    names: Sequence[str],
    network: Network,
    rows: Mapping[str, Array],
    device: Device,
    *,
    max_rows: int = MAX_ROWS,
) -> Iterator[Variant | Unavailable]:
    """Builds every requested variant, fp32 first. `rows`: num and cat of training rows, for calibration. `max_rows`:
    the largest batch that an engine is built for."""
    builders: Mapping[str, Callable[[], onnx.ModelProto | str]] = {
        "fp32": lambda: network.graph,
        "fp16": lambda: to_fp16(network.graph, rows),
        "int8": lambda: to_int8(network.graph, rows),
        "int8_dynamic": lambda: to_int8_dynamic(network.graph),
        "int8_embeddings": lambda: to_int8_embeddings(network.graph),
        "pruned": lambda: network.smaller.get("pruned", "the training wrote no pruned weights"),
        "tensorrt": lambda: missing_tensorrt() or to_fp16(network.graph, rows),
        "tensorrt_rtx": lambda: _for_rtx(to_fp16(network.graph, rows), max_rows),
    }
    for name in sorted(names, key=lambda name: name != "fp32"):
        made = builders[name]()
        if isinstance(made, str):
            yield Unavailable(name=name, reason=made)
        else:
            yield Variant(
                name=name,
                graph=made,
                device=_ENGINES.get(name, device),
                steady=name != "int8_dynamic",
                learned=name == "pruned",
                experimental=name == "tensorrt_rtx",
            )


def _for_rtx(graph: onnx.ModelProto | str, max_rows: int) -> onnx.ModelProto | str:
    return graph if isinstance(graph, str) else rtx_reason(graph, max_rows=max_rows) or graph


# Only the rows that a request needs are dequantised; the rest of the network does not change.
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
