"""An ONNX model with custom inputs (images, text): reads its schema from the graph and converts its answer.

Every input and output begins with the batch dimension, which must be free; the other dimensions are fixed. Golden rows
come as `golden.npz`: one array per input, and the answers of the model's own framework where they are known.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pyarrow as pa
from onnx import TensorProto, helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import ModelUnfit
from serin.formats.schema import (
    DType,
    InputColumn,
    Kind,
    Schema,
    Task,
    input_columns,
    outputs_of,
)
from serin.formats.shards import Array
from serin.models.foreign.own_graph import back_to_logits, whole_model

_PREFIX = "own/"
_KINDS: dict[int, tuple[DType, Kind]] = {
    TensorProto.FLOAT: ("FP32", "float"),
    TensorProto.INT64: ("INT64", "int"),
    TensorProto.STRING: ("BYTES", "string"),
}
_KNOWN = "float32, int64 and string; cast to others inside the graph"


def own_schema(model: onnx.ModelProto, task: Task, classes: tuple[str, ...] | None, what: str) -> Schema:
    """Returns the schema of the served model; raises ModelUnfit for a graph that no request can be made for."""
    constants = {each.name for each in model.graph.initializer}
    asked = [each for each in model.graph.input if each.name not in constants]
    inputs = input_columns([_entry(each, what) for each in asked])
    if not inputs:
        raise ModelUnfit(what=what, reason="its graph has no inputs")
    count = len(classes) if classes else None
    if task == "multiclass" and count is None:
        (output,) = _outputs(model, what)
        count = _dims(output, what)[-1]
        classes = tuple(str(number) for number in range(count))
    outputs = outputs_of(task, count)
    for name in {each.name for each in outputs} & {each.name for each in inputs}:
        raise ModelUnfit(what=what, reason=f"its input {name!r} has the name of the answer; rename it")
    return Schema(task=task, inputs=inputs, outputs=outputs, classes=classes)


def with_answer(
    model: onnx.ModelProto, schema: Schema, answer: Literal["logits", "probabilities"], what: str
) -> onnx.ModelProto:
    """Returns `model` with the schema's inputs and, in place of its only output, the schema's outputs."""
    inner = onnx.compose.add_prefix(model, _PREFIX)
    (output,) = _outputs(inner, what)
    columns, wanted = _dims(output, what)[-1], len(schema.classes or ()) if schema.task == "multiclass" else 1
    pair = answer == "probabilities" and schema.task == "binary" and columns == 2
    if columns != wanted and not pair:
        reason = f"its output has {columns} columns, but a {schema.task} model has {wanted}"
        raise ModelUnfit(what=what, reason=reason)
    graph = GraphBuilder(f"{_PREFIX}form/")
    axis = graph.constant(np.array([1], np.int64), "axis")
    for column in schema.inputs:
        (given,) = (each for each in inner.graph.input if each.name == _PREFIX + column.name)
        flat = len(given.type.tensor_type.shape.dim) == 1  # [batch]: on the wire it is [batch, 1]
        op, more = ("Squeeze", [axis]) if flat else ("Identity", [])
        graph.nodes.append(helper.make_node(op, [column.name, *more], [given.name], name=f"{given.name}_"))
    graph.nodes.extend(inner.graph.node)
    logits = output.name
    if answer == "probabilities":
        logits = back_to_logits(graph, logits, schema.task, columns)
    if schema.task == "multiclass":
        graph.nodes.append(
            helper.make_node("Softmax", [logits], ["probabilities"], name="own/softmax", axis=1)
        )
        graph.nodes.append(
            helper.make_node("ArgMax", [logits], ["label"], name="own/argmax", axis=1, keepdims=1)
        )
    else:
        last = "Sigmoid" if schema.task == "binary" else "Identity"
        graph.nodes.append(helper.make_node(last, [logits], ["score"], name="own/score"))
    inputs, outputs = (
        [
            helper.make_tensor_value_info(each.name, ELEMENT_OF_DTYPE[each.dtype], ["batch", *each.dims])
            for each in tensors
        ]
        for tensors in (schema.inputs, schema.outputs)
    )
    constants = [*graph.initializers, *inner.graph.initializer]
    whole = helper.make_graph(graph.nodes, "own", inputs, outputs, initializer=constants)
    return whole_model(whole, inner, what)


def read_golden_arrays(path: Path, schema: Schema, what: str) -> dict[str, Array]:
    """Returns the inputs in wire form and the known answers; raises ModelUnfit when a row is incomplete."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelUnfit(what=what, reason=f"{path.name} is not an .npz file of arrays: {error}") from error
    found: dict[str, Array] = {}
    for column in schema.inputs:
        if column.name not in arrays:
            reason = f"{path.name} lacks {column.name!r}; it has {', '.join(arrays) or 'nothing'}"
            raise ModelUnfit(what=what, reason=reason)
        found[column.name] = _wire(arrays[column.name], column, path, what)
    for output in schema.outputs:
        if output.name in arrays:
            values = np.asarray(arrays[output.name])
            found[output.name] = values.reshape(len(values), *output.dims)
    rows = {len(values) for values in found.values()}
    if len(rows) != 1 or not min(rows):
        raise ModelUnfit(
            what=what, reason=f"{path.name} must have the same number of rows, at least one, in each array"
        )
    return found


def golden_table(arrays: dict[str, Array]) -> pa.Table:
    """Returns the table as stored: a value of several numbers is a list of fixed size."""
    columns = {}
    for name, values in arrays.items():
        flat = pa.array(values.reshape(-1).tolist() if values.dtype == object else values.reshape(-1))
        size = values[0].size
        columns[name] = flat if size == 1 else pa.FixedSizeListArray.from_arrays(flat, size)
    return pa.table({**columns, "row": np.arange(len(next(iter(arrays.values()))))})


def _wire(values: Array, column: InputColumn, path: Path, what: str) -> Array:
    kinds = {"float": np.float32, "int": np.int64, "string": object}
    try:
        shaped = np.asarray(values).reshape(len(values), *column.dims)
        return (
            np.frompyfunc(str, 1, 1)(shaped) if column.kind == "string" else shaped.astype(kinds[column.kind])
        )
    except (ValueError, TypeError) as error:
        form = "x".join(map(str, column.dims))
        reason = (
            f"{path.name}: {column.name!r} is {values.dtype}{list(values.shape)}, expected rows of {form}"
        )
        raise ModelUnfit(what=what, reason=reason) from error


def _entry(tensor: onnx.ValueInfoProto, what: str) -> dict[str, object]:
    element = tensor.type.tensor_type.elem_type
    if element not in _KINDS:
        kind = TensorProto.DataType.Name(element).lower()
        raise ModelUnfit(what=what, reason=f"its input {tensor.name} is {kind}; a request can have {_KNOWN}")
    dtype, kind = _KINDS[element]
    dims = _dims(tensor, what)
    if kind == "string" and dims != (1,):
        raise ModelUnfit(
            what=what, reason=f"its input {tensor.name} has {dims} strings in a row; one is allowed"
        )
    return {"name": tensor.name, "kind": kind, "dtype": dtype, "dims": dims}


def _outputs(model: onnx.ModelProto, what: str) -> list[onnx.ValueInfoProto]:
    if len(model.graph.output) != 1:
        names = [each.name for each in model.graph.output]
        raise ModelUnfit(
            what=what, reason=f"its outputs are {names}; keep one output of logits, or of probabilities"
        )
    return list(model.graph.output)


def _dims(tensor: onnx.ValueInfoProto, what: str) -> tuple[int, ...]:
    """Returns the dimensions of one row; (1,) for a tensor of the batch alone."""
    dims = tensor.type.tensor_type.shape.dim
    if not dims or dims[0].HasField("dim_value"):
        reason = f"{tensor.name} must begin with a free batch dimension; export it with a dynamic one"
        raise ModelUnfit(what=what, reason=reason)
    if not all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in dims[1:]):
        reason = f"{tensor.name} has free dimensions behind the batch; fix them, or pad inside the graph"
        raise ModelUnfit(what=what, reason=reason)
    return tuple(dim.dim_value for dim in dims[1:]) or (1,)
