"""Fuses one graph from raw columns to the answer: the feature graph, the network, and the form of the answer.

The names of the inputs are the request's column names, whatever they are; all inner names are chosen to avoid them. The
answer is `score` (a probability, or a regression's value), or `label` and `probabilities`. The feature graph has one
input [batch, 1] per request column; inside, every column is [batch] until the features are stacked to the tensors `num`
and `cat`. Lookup tables become part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import pyarrow.parquet as pq
from onnx import compose, helper

from serin.columns.derived import typed
from serin.columns.expression2onnx import expression_to_onnx
from serin.columns.keys import label_encoder, lookup_to_onnx
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import ExportFailed
from serin.features.plan import FeaturePlan
from serin.formats.dataset import DerivedDescription, LookupDescription
from serin.formats.external_data import check_graph, give_references, take_references
from serin.formats.nulls import null_strings
from serin.formats.schema import InputColumn, Schema


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
    front = deepcopy(features.model)
    front.ir_version = back.ir_version = max(front.ir_version, back.ir_version)
    _raise_opset("ai.onnx.ml", front, back)
    logits, large = f"{prefix}logits", take_references(back)
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
    give_references(model, large)
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
    check_graph(core)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureGraph:
    """A graph from request columns to two tensors: `num` float32[batch, k] and `cat` int64[batch, m] (their names)."""

    model: onnx.ModelProto
    num: str
    cat: str


class ServedColumns(Protocol):
    """What a graph of features begins with: a dataset's description, or what a bundle keeps of it."""

    @property
    def inputs(self) -> Sequence[InputColumn]: ...

    @property
    def lookups(self) -> Sequence[LookupDescription]: ...

    @property
    def derived(self) -> Sequence[DerivedDescription]: ...


def features2onnx(plan: FeaturePlan, dataset: ServedColumns, folder: Path) -> FeatureGraph:
    """Returns the graph of `plan`, with the lookup tables of the dataset in `folder`."""
    graph = GraphBuilder(free_prefix("features/", (column.name for column in dataset.inputs)))
    axis = graph.constant(np.array([1], dtype=np.int64), "axis")
    columns = {
        column.name: _without_null_texts(graph, graph.op("Squeeze", column.name, axis), column.null_texts)
        for column in dataset.inputs
    }
    for table in dataset.lookups:
        rows = pq.read_table(folder / table.file)
        columns |= lookup_to_onnx(graph, rows, table.key, columns[table.key], table.columns)
    for derived in dataset.derived:
        columns[derived.name] = expression_to_onnx(graph, typed(derived.expression, derived.kinds), columns)
    num, cat = plan.to_onnx(graph, columns)
    model = graph.to_model(
        inputs={column.name: (ELEMENT_OF_DTYPE[column.dtype], ("batch", 1)) for column in dataset.inputs},
        outputs={
            num: (onnx.TensorProto.FLOAT, ("batch", len(plan.numeric))),
            cat: (onnx.TensorProto.INT64, ("batch", len(plan.categorical))),
        },
    )
    return FeatureGraph(model=model, num=num, cat=cat)


def _without_null_texts(graph: GraphBuilder, values: str, texts: Sequence[str]) -> str:
    """The column with "", which is null, for the texts that mean null in its table."""
    null, *others = null_strings(texts)
    if not others:
        return values
    found = label_encoder(graph, values, keys=others, places=[1] * len(others), default=0)
    is_null = graph.op("Cast", found, to=onnx.TensorProto.BOOL)
    return graph.op("Where", is_null, graph.constant(np.asarray(null, dtype=object), "no_text"), values)


def free_prefix(prefix: str, taken: Iterable[str]) -> str:
    """Returns `prefix`, extended until no name in `taken` begins with it: a column may have any name."""
    names = tuple(taken)
    while any(name.startswith(prefix) for name in names):
        prefix = "_" + prefix
    return prefix
