"""Where codes come from: a categorical step on a column, or on numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serin.columns.column import Column
from serin.features.fitted import CategoricalStep, Codes
from serin.features.numbers import Numbers
from serin.features.sample import Sample
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalFeature:
    """`numbers`: what the step reads instead of the column itself."""

    column: str
    kind: Kind
    step: CategoricalStep
    numbers: Numbers | None = None

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind} if self.numbers is None else self.numbers.columns

    @property
    def name(self) -> str:
        return self.column if self.numbers is None else self.numbers.name

    @property
    def outputs(self) -> tuple[CategoricalColumn, ...]:
        return self.step.outputs(self.name)

    def transform(self, sample: Sample) -> tuple[Codes, ...]:
        if self.numbers is None:
            return self.step.transform(sample.columns[self.column])
        return self.step.transform(Column(kind="float", values=self.numbers.of(sample)))

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        if self.numbers is None:
            return self.step.to_onnx(graph, inputs[self.column], self.kind)
        return self.step.to_onnx(graph, self.numbers.to_onnx(graph, inputs), "float")

    def describe(self) -> str:
        before = "" if self.numbers is None else self.numbers.describe()
        return f"{before}; {self.step.describe()}" if before else self.step.describe()
