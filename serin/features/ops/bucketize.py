"""A number becomes the code of its interval: 0 null, 1 below the first edge, and one more from each edge on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import Field, model_validator

from serin.columns.column import Column, array_module
from serin.features.aggregates.aggregate import Fit
from serin.features.fitted import Codes, StoredFields
from serin.features.operator import Finite, Operator, Source, float32_of, register
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind
from serin.spec.steps.step import NUMBERS

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_INT64 = 7  # onnx.TensorProto.INT64


class Bucketize(Operator):
    """Numbers become the codes of intervals between `edges`, or between that many `quantiles`; 0 is null."""

    name = "bucketize"
    kinds = NUMBERS
    follows = ("raw", "numbers")
    gives = "codes"
    positional = "edges"
    edges: tuple[Finite, ...] | None = Field(default=None, min_length=1)
    """The edges between the intervals, rising. An edge belongs to the interval above it."""
    quantiles: int | None = Field(default=None, ge=2, le=1024)
    """The number of intervals with equally many training rows."""

    @model_validator(mode="after")
    def _edges_rise(self) -> Self:
        if (self.edges is None) == (self.quantiles is None):
            raise ValueError("give either edges: [1, 10, 100] or quantiles: 10")
        if self.edges is not None and list(self.edges) != sorted(set(self.edges)):
            raise ValueError(f"edges={list(self.edges)} must increase")
        return self

    def fit(self, source: Source) -> Fit[FittedBucketize]:
        if self.edges is not None:
            return FittedBucketize(tuple(sorted({float32_of(edge) for edge in self.edges})))
        assert self.quantiles is not None
        shares = [place / self.quantiles for place in range(1, self.quantiles)]
        found = yield from source.distribution.quantiles(shares)
        return FittedBucketize(tuple(sorted(set(found))))  # equal quantiles make one edge


@dataclass(frozen=True, slots=True)
class FittedBucketize(StoredFields):
    """The edges are rising float32 values. An edge belongs to the interval above it."""

    edges: tuple[float, ...]

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]:
        return (CategoricalColumn(name=column, size=2 + len(self.edges)),)

    def labels(self) -> tuple[tuple[str, ...], ...]:
        ends = [f"{edge:g}" for edge in self.edges]
        return (("null", *(f"{low}..{high}" for low, high in zip(["", *ends], [*ends, ""], strict=True))),)

    def transform(self, column: Column) -> tuple[Codes, ...]:
        values = column.floats()
        xp = array_module(values)
        edges = xp.asarray(np.asarray(self.edges, np.float32))
        codes = xp.searchsorted(edges, values, side="right").astype(np.int32) + np.int32(1)
        return (xp.where(xp.isnan(values), np.int32(0), codes),)

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        assert kind == "float"
        last = graph.constant(np.asarray([1], np.int64), "axis")
        edges = graph.constant(np.asarray([self.edges], np.float32), "edges")
        reached = graph.op("GreaterOrEqual", graph.op("Unsqueeze", values, last), edges)
        count = graph.op("ReduceSum", graph.op("Cast", reached, to=_INT64), last, keepdims=0)
        code = graph.op("Add", count, graph.constant(np.int64(1), "one"))
        zero = graph.constant(np.int64(0), "zero")
        return (graph.op("Where", graph.op("IsNaN", values), zero, code),)

    def describe(self) -> str:
        shown = ", ".join(f"{edge:g}" for edge in self.edges[:8]) + (", ..." if len(self.edges) > 8 else "")
        return f"{1 + len(self.edges)} intervals with edges at {shown or 'no value'}; 0 for null"


register(Bucketize, FittedBucketize)
