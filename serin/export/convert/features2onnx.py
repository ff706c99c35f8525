"""Converts fitted features to an ONNX graph: one input [batch, 1] per request column to the tensors `num` and `cat`.

Inside, every column is [batch] until the features are stacked. Lookup tables become part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pyarrow.parquet as pq

from serin.columns.derived import typed
from serin.columns.expression2onnx import expression_to_onnx
from serin.columns.keys import label_encoder, lookup_to_onnx
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.features.plan import FeaturePlan
from serin.formats.dataset import DatasetDescription
from serin.formats.nulls import null_strings


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureGraph:
    """A graph from request columns to two tensors: `num` float32[batch, k] and `cat` int64[batch, m] (their names)."""

    model: onnx.ModelProto
    num: str
    cat: str


def features2onnx(plan: FeaturePlan, dataset: DatasetDescription, folder: Path) -> FeatureGraph:
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
            num: (onnx.TensorProto.FLOAT, ("batch", len(dataset.numeric))),
            cat: (onnx.TensorProto.INT64, ("batch", len(dataset.categorical))),
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
