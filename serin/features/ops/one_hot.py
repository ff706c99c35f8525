"""Turns codes into columns of 0 and 1, one for each code except null's: null is 0 in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from serin.errors import ColumnUnusable
from serin.features.aggregates.aggregate import Fit
from serin.features.fitted import Floats, Sample
from serin.features.numbers import CategoricalFeature
from serin.features.operator import Operator, Source, register
from serin.features.ops.categorify import FittedCategorify, fit_vocabulary
from serin.formats.schema import Kind
from serin.spec.steps.step import VALUES

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

MOST_COLUMNS = 1024
_FLOAT = 1  # onnx.TensorProto.FLOAT


class OneHot(Operator):
    """A column of 0 and 1 for each code, or for each value as categorify would code it; null is 0 in all."""

    name = "one_hot"
    kinds = VALUES
    follows = ("raw", "codes")
    gives = "end"
    min_count: int = Field(default=1, ge=1)
    """The number of training rows that a value needs to get its own column."""
    max_size: int | None = Field(default=64, ge=1)
    """The largest number of values with their own column. `null` sets no limit."""

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}=",)

    def fit(self, source: Source) -> Fit[FittedOneHot]:
        if source.codes is not None:
            return FittedOneHot.of(source.codes)
        vocabulary = yield from fit_vocabulary(source.columns, self.min_count, self.max_size)
        step = FittedCategorify(vocabulary, buckets=1)
        return FittedOneHot.of(CategoricalFeature(column=source.column, kind=source.kind, step=step))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedOneHot:
    exact: ClassVar[bool] = True
    inner: CategoricalFeature

    @classmethod
    def of(cls, codes: CategoricalFeature) -> FittedOneHot:
        for output in codes.outputs:
            if output.size > 1 + MOST_COLUMNS:
                raise ColumnUnusable(
                    column=output.name,
                    problem=f"one_hot of {output.name!r} would make {output.size - 1:,} columns; set max_size, "
                    f"or remove one_hot and let the network embed the codes (at most {MOST_COLUMNS} columns)",
                )
        return cls(inner=codes)

    @property
    def columns(self) -> Mapping[str, Kind]:
        return self.inner.columns

    def outputs(self) -> tuple[str, ...]:
        labelled = zip(self.inner.outputs, self.inner.step.labels(), strict=True)
        return tuple(f"{output.name}={label}" for output, labels in labelled for label in labels[1:])

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        made = zip(self.inner.outputs, self.inner.transform(sample), strict=True)
        return tuple(
            (codes == np.int32(code)).astype(np.float32)
            for output, codes in made
            for code in range(1, output.size)
        )

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        made = zip(self.inner.outputs, self.inner.to_onnx(graph, inputs), strict=True)
        return tuple(
            graph.op("Cast", graph.op("Equal", codes, graph.constant(np.int64(code), "code")), to=_FLOAT)
            for output, codes in made
            for code in range(1, output.size)
        )

    def describe(self) -> str:
        return f"{self.inner.describe()}; a column of 0 and 1 for each code but null's"

    def to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: CategoricalFeature) -> FittedOneHot:  # noqa: ARG003
        return cls(inner=inner)


register(OneHot, FittedOneHot)
