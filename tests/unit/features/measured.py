"""Answers for fits over rows that are already here, in as many pieces as a test likes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa

from serin.columns.column import Array, Column, column_from_wire
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.features.aggregates.aggregate import Aggregate, Answer
from serin.features.fitted import Sample
from serin.features.plan import FeaturePlan
from serin.formats.schema import DTYPE_OF_KIND, Kind
from serin.spec.features import FeatureSpec

Columns = Mapping[str, Column]


def columns_of(wire: Mapping[str, Array], kinds: Mapping[str, Kind]) -> dict[str, Column]:
    return {name: column_from_wire(values, kinds[name]) for name, values in wire.items()}


def answer_over(
    pieces: Sequence[Columns], rows: Sequence[Array] = (), targets: Sequence[Array] = ()
) -> Answer:
    """`rows` and `targets`: ids and targets per piece; without them nothing may ask for either."""
    samples = [
        Sample(
            columns=piece,
            fold_ids=rows[index] if rows else None,
            target=targets[index] if targets else None,
            training=len(rows[index]) if rows else 0,
        )
        for index, piece in enumerate(pieces)
    ]

    def answer(aggregates: tuple[Aggregate, ...]) -> list[Any]:
        found = []
        for aggregate in aggregates:
            merged = aggregate.measure(samples[0])
            for sample in samples[1:]:
                merged = aggregate.merge(merged, aggregate.measure(sample))
            found.append(merged)
        return found

    return answer


def fit(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], *pieces: Columns) -> FeaturePlan:
    return FeaturePlan.fit(features, kinds, answer_over(pieces))


def run_graph(plan: FeaturePlan, wire: Mapping[str, Array]) -> tuple[Array, Array]:
    """The plan's features out of ONNX Runtime."""
    graph = GraphBuilder()
    num, cat = plan.to_onnx(graph, {name: name for name in plan.columns})
    model = graph.to_model(
        {name: (ELEMENT_OF_DTYPE[DTYPE_OF_KIND[kind]], ["batch"]) for name, kind in plan.columns.items()},
        {num: (1, ["batch", len(plan.numeric)]), cat: (7, ["batch", len(plan.categorical)])},
    )
    return run_model(model, {name: wire[name] for name in plan.columns})


def run_model(model: Any, wire: Mapping[str, Array]) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return tuple(session.run(None, dict(wire)))


def same_bits(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def strings(*values: str | None) -> Column:
    return column_from_wire(np.asarray([value or "" for value in values], object), "string")


def texts(values: Sequence[str]) -> Array:
    return np.asarray(pa.array(values, pa.string()).to_pylist(), dtype=object)
