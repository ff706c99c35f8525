"""Converts a user's ONNX model to the form that the stages after training expect.

`num` float32[batch, k] and `cat` int64[batch, m] to `logits` float32[batch, outputs]. The file may leave out an input
that it does not need, may give its only input and its only output any name, may take float64 or int32, and may answer
with probabilities where the spec says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, version_converter

from serin.columns.onnx_graph import IR_VERSION, OPSETS, GraphBuilder
from serin.errors import ModelUnfit
from serin.formats.external_data import external_tensors
from serin.formats.schema import Task
from serin.models.shape import TableShape

_PREFIX = "own/"
_SURE = 1e-7  # the closest a probability may be to 0 or 1 when it is converted to a logit
_ONNX_ERRORS = (
    onnx.checker.ValidationError, onnx.shape_inference.InferenceError, version_converter.ConvertError,
    RuntimeError, ValueError,
)  # fmt: skip


def load_graph(path: Path, what: str) -> onnx.ModelProto:
    """Loads the model in `path`, complete, valid and of Serin's opset; raises ModelUnfit with what is wrong."""
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelUnfit(what=what, reason=f"{path.name} is not an ONNX file: {error}") from error
    if not model.graph.node:
        raise ModelUnfit(what=what, reason=f"{path.name} is not an ONNX file, or its graph is empty")
    if any(external_tensors(model)):
        raise ModelUnfit(what=what, reason=f"{path.name} keeps weights in another file; save it as one file")
    try:
        onnx.checker.check_model(model)
        model = _of_our_opset(model)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except _ONNX_ERRORS as error:
        reason = f"{path.name} is not valid ONNX: {str(error).strip().splitlines()[0]}"
        raise ModelUnfit(what=what, reason=reason) from error


def as_network(
    model: onnx.ModelProto,
    shape: TableShape,
    task: Task,
    *,
    answer: Literal["logits", "probabilities"],
    what: str,
) -> onnx.ModelProto:
    """Returns `model` from num and cat to logits; raises ModelUnfit when its inputs or its output do not fit the
    table."""
    inner = onnx.compose.add_prefix(model, _PREFIX)
    nodes = _inputs(inner, shape, what)
    output = _output(inner, answer, task, shape, what)
    after = GraphBuilder(f"{_PREFIX}answer/")
    if answer == "probabilities":
        output = back_to_logits(after, output, task, _columns(inner.graph.output, output))
    last = helper.make_node("Identity", [output], ["logits"], name=f"{_PREFIX}logits")
    inputs = [
        helper.make_tensor_value_info("num", TensorProto.FLOAT, ["batch", shape.numeric]),
        helper.make_tensor_value_info("cat", TensorProto.INT64, ["batch", len(shape.sizes)]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", shape.outputs])]
    nodes = [*nodes, *inner.graph.node, *after.nodes, last]
    constants = [*inner.graph.initializer, *after.initializers]
    graph = helper.make_graph(nodes, "own", inputs, outputs, initializer=constants)
    return whole_model(graph, inner, what, "does not fit num and cat: ")


def whole_model(
    graph: onnx.GraphProto, inner: onnx.ModelProto, what: str, problem: str = ""
) -> onnx.ModelProto:
    """Returns the checked model of a graph around that of `inner`."""
    opsets = [helper.make_opsetid(each.domain, each.version) for each in inner.opset_import]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="serin")
    made.functions.extend(inner.functions)
    try:
        onnx.checker.check_model(made, full_check=True)
    except _ONNX_ERRORS as error:
        reason = f"{problem}{str(error).strip().splitlines()[0]}"
        raise ModelUnfit(what=what, reason=reason) from error
    return made


def _of_our_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Converts older graphs; newer ones must not use new features."""
    version = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    if version and version != OPSETS[""]:
        model = version_converter.convert_version(model, OPSETS[""])
    for each in model.opset_import:
        if each.domain == "ai.onnx.ml":
            each.version = max(each.version, OPSETS["ai.onnx.ml"])
    onnx.checker.check_model(model)
    return model


def _inputs(inner: onnx.ModelProto, shape: TableShape, what: str) -> list[onnx.NodeProto]:
    """Adds casts from num and cat to the graph's own inputs, which are then no longer inputs."""
    constants = {each.name for each in inner.graph.initializer}
    asked = [each for each in inner.graph.input if each.name not in constants]
    wanted = {"num": shape.numeric, "cat": len(shape.sizes)}
    present = [name for name, columns in wanted.items() if columns]
    names = {each.name: each.name.removeprefix(_PREFIX) for each in asked}
    if len(asked) == len(present) == 1:
        names = {asked[0].name: present[0]}
    nodes = []
    for each in asked:
        name = names[each.name]
        if name not in wanted:
            raise ModelUnfit(
                what=what,
                reason=f"it needs {sorted(names.values())}, but the dataset has num float32[rows, {shape.numeric}] "
                f"and cat int64[rows, {len(shape.sizes)}]; rename its inputs, or leave one out",
            )
        columns = _columns([each], each.name)
        if columns not in (None, wanted[name]):
            reason = f"its input {name} has {columns} columns, but the dataset has {wanted[name]}"
            raise ModelUnfit(what=what, reason=reason)
        element = each.type.tensor_type.elem_type
        nodes.append(helper.make_node("Cast", [name], [each.name], name=f"{_PREFIX}cast_{name}", to=element))
    return nodes


def _output(inner: onnx.ModelProto, answer: str, task: Task, shape: TableShape, what: str) -> str:
    names = [each.name.removeprefix(_PREFIX) for each in inner.graph.output]
    chosen = answer if answer in names else names[0] if len(names) == 1 else None
    if chosen is None:
        reason = f"its outputs are {names}; keep one, or name it {answer}"
        raise ModelUnfit(what=what, reason=reason)
    found = _columns(inner.graph.output, _PREFIX + chosen)
    pair = answer == "probabilities" and task == "binary" and found == 2  # one column for each class
    if found not in (None, shape.outputs) and not pair:
        reason = f"its output {chosen} has {found} columns, but a {task} model has {shape.outputs}"
        raise ModelUnfit(what=what, reason=reason)
    return _PREFIX + chosen


def _columns(tensors: Iterable[onnx.ValueInfoProto], name: str) -> int | None:
    """Returns the second and last dimension, when the graph knows it; 0 for a tensor of another rank."""
    (tensor,) = (each for each in tensors if each.name == name)
    kind = tensor.type.tensor_type
    if not kind.HasField("shape"):
        return None
    dims = kind.shape.dim
    if len(dims) != 2:
        return 0
    return int(dims[1].dim_value) if dims[1].HasField("dim_value") else None


def back_to_logits(graph: GraphBuilder, output: str, task: Task, columns: int | None) -> str:
    """Converts probabilities to logits whose sigmoid or softmax gives them; a binary model may have one for each
    class."""
    if task == "regression":
        return output
    low, high = (graph.constant(np.array(limit, np.float32)) for limit in (_SURE, 1.0 - _SURE))
    kept = graph.op("Clip", output, low, high)
    if task == "multiclass":
        return graph.op("Log", kept)
    if columns == 2:
        kept = graph.op("Gather", kept, graph.constant(np.array([1], np.int64)), axis=1)
    other = graph.op("Sub", graph.constant(np.array(1.0, np.float32)), kept)
    return graph.op("Sub", graph.op("Log", kept), graph.op("Log", other))
