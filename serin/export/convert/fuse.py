"""Fuses one graph from raw columns to the answer: the feature graph, the network, and the form of the answer.

The names of the inputs are the request's column names, whatever they are; all inner names are chosen to avoid them. The
answer is `score` (a probability, or a regression's value), or `label` and `probabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import compose, helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE
from serin.errors import ExportFailed
from serin.export.convert.features2onnx import FeatureGraph, free_prefix
from serin.formats.schema import Schema


def fuse(features: FeatureGraph, network: onnx.ModelProto, schema: Schema) -> onnx.ModelProto:
    """Fuses features, network (num, cat -> logits) and the form of the answer, and checks the result."""
    columns = [column.name for column in schema.inputs]
    for output in schema.outputs:
        if output.name in columns:
            raise ExportFailed(
                what="the model",
                reason=f"request column {output.name!r} has the name of the model's answer; rename it",
            )
    prefix = free_prefix("network/", columns)
    back = compose.add_prefix(network, prefix)
    front = onnx.ModelProto()
    front.CopyFrom(features.model)
    front.ir_version = back.ir_version = max(front.ir_version, back.ir_version)
    _raise_opset("ai.onnx.ml", front, back)
    logits = f"{prefix}logits"
    try:
        model = compose.merge_models(
            front,
            back,
            io_map=[(features.num, f"{prefix}num"), (features.cat, f"{prefix}cat")],
            outputs=[logits],
        )
        _answer(model.graph, logits, schema, free_prefix("answer/", columns))
        onnx.checker.check_model(model, full_check=True)
    except (ValueError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportFailed(what="the model", reason=f"features and network do not fit: {error}") from error
    return model


def _raise_opset(domain: str, *models: onnx.ModelProto) -> None:
    """Sets the newest opset version that one of the models needs in all of them.

    Trees need a newer one than features do, and the operators that features use have not changed since.
    """
    found = [opset for model in models for opset in model.opset_import if opset.domain == domain]
    for opset in found:
        opset.version = max(each.version for each in found)


def core_of(features: FeatureGraph, network: onnx.ModelProto, schema: Schema) -> onnx.ModelProto:
    """Returns the network and the form of the answer without the features, for an accelerator."""
    prefix = free_prefix("network/", (features.num, features.cat))
    core = compose.add_prefix(network, prefix)
    names = {f"{prefix}num": features.num, f"{prefix}cat": features.cat}
    for tensor in core.graph.input:
        tensor.name = names[tensor.name]
    for node in core.graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
    _answer(core.graph, f"{prefix}logits", schema, "answer/")
    core.ir_version = max(core.ir_version, features.model.ir_version)
    onnx.checker.check_model(core)
    return core


def name_model(model: onnx.ModelProto, properties: Mapping[str, str]) -> None:
    """Writes names and properties into the model's metadata, without changing its computation."""
    model.graph.name = properties["name"]
    model.producer_name, model.producer_version, model.doc_string = "serin", "", ""
    helper.set_model_props(model, dict(properties))


def _answer(graph: onnx.GraphProto, logits: str, schema: Schema, prefix: str) -> None:
    """Adds the nodes from logits to the schema's outputs."""
    match schema.task:
        case "binary":
            nodes = [helper.make_node("Sigmoid", [logits], ["score"], name=f"{prefix}sigmoid")]
        case "regression":
            nodes = [helper.make_node("Identity", [logits], ["score"], name=f"{prefix}value")]
        case "multiclass":
            nodes = [
                helper.make_node("Softmax", [logits], ["probabilities"], name=f"{prefix}softmax", axis=1),
                helper.make_node("ArgMax", [logits], ["label"], name=f"{prefix}argmax", axis=1, keepdims=1),
            ]
    graph.node.extend(nodes)
    del graph.output[:]
    for output in schema.outputs:
        shape: list[str | int | None] = ["batch", *output.dims]
        graph.output.append(helper.make_tensor_value_info(output.name, ELEMENT_OF_DTYPE[output.dtype], shape))
