"""Converts a network to float16 where it is harmless, and keeps float32 where operators or values are sensitive.

An operator stays in float32 when float16 is known to break it (sums, exponentials, normalisations), or when an input or
output on the calibration rows is too large for float16 to represent well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx

from serin.formats.wire import Array
from serin.scoring.session import float_tensors, run_with_inner

LARGEST = 1024.0  # up to here float16's steps are below one thousandth of the value
SENSITIVE = (
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization",
    "ReduceMean", "ReduceSum", "ReduceL2", "CumSum", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Div", "Erf", "Sigmoid",
    "Cos", "TreeEnsemble",
)  # fmt: skip


def to_fp16(network: onnx.ModelProto, rows: Mapping[str, Array]) -> onnx.ModelProto | str:
    """Returns the network in mixed precision, with float32 inputs and outputs; or the reason why that is impossible."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    if not any(node.op_type in ("Gemm", "MatMul") for node in network.graph.node):
        return "it has no layers with weights to convert"
    copy = onnx.ModelProto()
    copy.CopyFrom(network)
    logger = logging.getLogger("onnxruntime.transformers.float16")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        converted: onnx.ModelProto = convert_float_to_float16(
            copy,
            keep_io_types=True,
            op_block_list=sorted({*DEFAULT_OP_BLOCK_LIST, *SENSITIVE}),
            node_block_list=large_nodes(network, rows),
        )
    finally:
        logger.setLevel(level)
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
