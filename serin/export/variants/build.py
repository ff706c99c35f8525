"""Builds the variants in which a network may be served, each from the same graph and the same training rows.

A variant that cannot be built here gives a reason, never a failure: the gate's report lists it with the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from serin.export.convert.network import Network
from serin.export.convert.onnx2trt import missing_tensorrt
from serin.export.convert.quiet import quiet
from serin.formats.external_data import references
from serin.formats.wire import Array
from serin.scoring.session import Device, float_tensors, run_with_inner

CALIBRATION_ROWS = 2048
_FEWEST_ROWS = 64  # below this nothing is saved
_STEPS = 127.0
_CALIBRATION_BATCH_ROWS = 256
_LAYERS = ("Gemm", "MatMul")
# Of 7 bits: two products fit into 16 bits then, where processors without VNNI add them.
_WEIGHTS = {"per_channel": True, "reduce_range": True}
_REWRITTEN = ("fp16", "int8", "int8_dynamic", "int8_embeddings", "tensorrt")
_LARGE = "its weights are in a file beside the graph, and this variant needs a graph that contains them"
LARGEST = 1024.0  # up to here float16's steps are below one thousandth of the value
SENSITIVE = (
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization",
    "ReduceMean", "ReduceSum", "ReduceL2", "CumSum", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Div", "Erf", "Sigmoid",
    "Cos", "TreeEnsemble",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A network's graph as it would be served.

    `steady`: a row's score does not depend on the other rows of its batch. `learned`: it was trained further after it
    was made, so its scores may differ and only its quality counts.
    """

    name: str
    graph: onnx.ModelProto
    device: Device = "cpu"
    steady: bool = True
    learned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    name: str
    reason: str


def build_variants(
    names: Sequence[str],
    network: Network,
    rows: Mapping[str, Array],
    device: Device,
) -> Iterator[Variant | Unavailable]:
    """Builds every requested variant, fp32 first. `rows`: num and cat of training rows, for calibration."""
    builders: Mapping[str, Callable[[], onnx.ModelProto | str]] = {
        "fp32": lambda: network.graph,
        "fp16": lambda: to_fp16(network.graph, rows),
        "int8": lambda: to_int8(network.graph, rows),
        "int8_dynamic": lambda: to_int8_dynamic(network.graph),
        "int8_embeddings": lambda: to_int8_embeddings(network.graph),
        "pruned": lambda: network.smaller.get("pruned", "the training wrote no pruned weights"),
        "tensorrt": lambda: missing_tensorrt() or to_fp16(network.graph, rows),
    }
    for name in sorted(names, key=lambda name: name != "fp32"):
        made = _LARGE if name in _REWRITTEN and references(network.graph) else builders[name]()
        if isinstance(made, str):
            yield Unavailable(name=name, reason=made)
        else:
            yield Variant(
                name=name,
                graph=made,
                device="tensorrt" if name == "tensorrt" else device,
                steady=name != "int8_dynamic",
                learned=name == "pruned",
            )


# Only the rows that a request needs are dequantised; the rest of the network does not change.
def to_int8_embeddings(network: onnx.ModelProto) -> onnx.ModelProto | str:
    """Returns the network with quantised tables, or the reason why that is impossible."""
    model = deepcopy(network)
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


# An operator stays in float32 when float16 is known to break it (sums, exponentials, normalisations), or when an input
# or output on the calibration rows is too large for float16 to represent well.
def to_fp16(network: onnx.ModelProto, rows: Mapping[str, Array]) -> onnx.ModelProto | str:
    """Returns the network in mixed precision, with float32 inputs and outputs; or the reason why that is impossible."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    if not any(node.op_type in _LAYERS for node in network.graph.node):
        return "it has no layers with weights to convert"
    with quiet("onnxruntime.transformers.float16"):
        converted: onnx.ModelProto = convert_float_to_float16(
            deepcopy(network),
            keep_io_types=True,
            op_block_list=sorted({*DEFAULT_OP_BLOCK_LIST, *SENSITIVE}),
            node_block_list=large_nodes(network, rows),
        )
    return _without_detours(_in_order(converted))


def _without_detours(model: onnx.ModelProto) -> onnx.ModelProto:
    """Passes float32 directly between kept operators and to the answer.

    The converter would cast it to float16 in between, which overflows exactly where the operators were kept for that
    reason.
    """
    del model.graph.value_info[:]  # some of them are outdated
    inferred = onnx.shape_inference.infer_shapes(model).graph
    infos = (*inferred.value_info, *inferred.input, *inferred.output)
    kinds = {info.name: info.type.tensor_type.elem_type for info in infos}
    casts = {node.output[0]: node for node in model.graph.node if node.op_type == "Cast"}
    for node in model.graph.node:
        narrow = casts.get(node.input[0]) if node.op_type == "Cast" else None
        if narrow is None or node.attribute[0].i != onnx.TensorProto.FLOAT:
            continue
        if (
            narrow.attribute[0].i == onnx.TensorProto.FLOAT16
            and kinds.get(narrow.input[0]) == onnx.TensorProto.FLOAT
        ):
            node.input[0] = narrow.input[0]
            node.op_type = "Identity"
            del node.attribute[:]
    used = {name for node in model.graph.node for name in node.input}
    used |= {output.name for output in model.graph.output}
    # A weight that is read twice is cast twice, to the same name: one cast is enough.
    kept = list({node.output[0]: node for node in model.graph.node if used & set(node.output)}.values())
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Sorts the nodes topologically: the converter puts its casts at the end."""
    waiting = list(model.graph.node)
    made = {node_output for node in waiting for node_output in node.output}
    known = {"", *(name for node in waiting for name in node.input if name not in made)}
    ordered: list[onnx.NodeProto] = []
    while waiting:
        ready = [node for node in waiting if known.issuperset(node.input)]
        assert ready, "the graph has a cycle"
        ordered += ready
        known.update(name for node in ready for name in node.output)
        waiting = [node for node in waiting if not known.issuperset(node.output)]
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    return model


def large_nodes(network: onnx.ModelProto, rows: Mapping[str, Array]) -> list[str]:
    """Returns the nodes with an input or output beyond `LARGEST`, where rounding would matter."""
    values = {**rows, **run_with_inner(network, rows, float_tensors(network))}
    for tensor in network.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values[tensor.name] = onnx.numpy_helper.to_array(tensor)
    large = {
        name
        for name, array in values.items()
        if array.dtype == np.float32 and array.size and not np.nanmax(np.abs(array)) <= LARGEST
    }
    return [node.name for node in network.graph.node if large & {*node.input, *node.output}]


def to_int8(network: onnx.ModelProto, rows: Mapping[str, Array]) -> onnx.ModelProto | str:
    """Returns a static quantisation (QDQ, per channel) whose ranges come from `rows` (num and cat of training rows), or
    why it is impossible."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    def quantise(source: str, target: str) -> None:
        batches = (
            {name: values[at : at + _CALIBRATION_BATCH_ROWS] for name, values in rows.items()}
            for at in range(0, len(rows["num"]), _CALIBRATION_BATCH_ROWS)
        )

        class Rows(CalibrationDataReader):  # type: ignore[misc]
            def get_next(self) -> dict[str, Array] | None:
                return next(batches, None)

        quantize_static(
            source,
            target,
            Rows(),
            quant_format=QuantFormat.QDQ,
            **_WEIGHTS,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=[*_LAYERS, "Gather", "Relu"],
        )

    return _quantised(network, quantise)


def to_int8_dynamic(network: onnx.ModelProto) -> onnx.ModelProto | str:
    """Returns integer weights with values quantised per batch, so that a row's score depends on the other rows of its
    batch; or why it is impossible."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    return _quantised(network, partial(quantize_dynamic, **_WEIGHTS, weight_type=QuantType.QInt8))


def _quantised(network: onnx.ModelProto, quantise: Callable[[str, str], None]) -> onnx.ModelProto | str:
    """Runs a quantiser from one file to another. It infers shapes itself: it changes layers without correcting them."""
    if not any(node.op_type in _LAYERS for node in network.graph.node):
        return "it has no layers with weights to quantise"
    copy = deepcopy(network)
    del copy.graph.value_info[:]
    with tempfile.TemporaryDirectory(prefix="serin-int8-") as folder, quiet(""):
        source, target = Path(folder, "network.onnx"), Path(folder, "quantised.onnx")
        source.write_bytes(copy.SerializeToString())
        quantise(str(source), str(target))
        model: onnx.ModelProto = onnx.load_model_from_string(target.read_bytes())
    model.producer_name, model.producer_version = "serin", ""
    del model.metadata_props[:]
    return model
