"""Where features come from: numbers, from a column or an encoding, through the steps applied to them; and codes, from a
categorical step on a column, or on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from serin.columns.column import Column, array_module
from serin.features.fitted import CategoricalStep, Codes, Encoding, Floats, NumericStep, Sample
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import INT64_NULL, Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_FLOAT = 1  # onnx.TensorProto.FLOAT
_LARGEST_LOG = 89.0  # no float32 has a larger logarithm
Made = dict[int, tuple[Any, ...]]  # results of encodings for a sample, or for a graph's inputs, by their id


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """float32 numbers, NaN for null. `column`: their source. `encoding`, `place`: the output they start from."""

    column: str
    kind: Kind
    encoding: Encoding | None = None
    place: int = 0
    steps: tuple[NumericStep, ...] = ()

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind} if self.encoding is None else self.encoding.columns

    @property
    def name(self) -> str:
        return self.column if self.encoding is None else self.encoding.outputs()[self.place]

    @property
    def exact(self) -> bool:
        return all(step.exact for step in self.steps) and (self.encoding is None or self.encoding.exact)

    @property
    def slack(self) -> float:
        """How far apart two results may be beyond 1 ulp; 0 when no step follows the function.

        This is what 1 ulp of a logarithm becomes when a later step takes a difference from it and divides it.
        """
        if self.exact:
            return 0.0
        largest, scale, inexact = 1.0, 1.0, self.encoding is not None and not self.encoding.exact
        later = False
        for step in self.steps:
            if not step.exact:
                largest, scale, inexact, later = _LARGEST_LOG, 1.0, True, False
            elif inexact:
                later = True
                scale *= getattr(step, "scale", 1.0)
        if later:
            return float(np.spacing(np.float32(largest))) / scale
        return float(getattr(self.encoding, "slack", 0.0))

    @property
    def start(self) -> Numbers:
        """The same before any step."""
        return replace(self, steps=())

    def after(self, step: NumericStep) -> Numbers:
        return replace(self, steps=(*self.steps, step))

    def blocks(self, sample: Sample, rows: int, made: Made | None = None) -> Iterator[Floats]:
        """The numbers in blocks of so many rows, the last one shorter: small enough for a processor's cache."""
        if self.encoding is None:
            for block in sample.columns[self.column].blocks(rows):
                yield through(self.steps, block.floats())
            return
        made = {} if made is None else made
        if id(self.encoding) not in made:
            made[id(self.encoding)] = self.encoding.transform(sample)
        values = made[id(self.encoding)][self.place]
        for start in range(0, len(values), rows):
            yield through(self.steps, values[start : start + rows])

    def of(self, sample: Sample) -> Floats:
        """The numbers of all rows, in one array."""
        blocks = list(self.blocks(sample, max(len(sample), 1)))
        if blocks:
            return blocks[0]
        xp = array_module(next(iter(sample.columns.values())).values)
        empty: Floats = xp.empty(0, np.float32)
        return empty

    def start_to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str], made: Made) -> str:
        """float32[batch], NaN for null, before any step."""
        if self.encoding is not None:
            if id(self.encoding) not in made:
                made[id(self.encoding)] = self.encoding.to_onnx(graph, inputs)
            return str(made[id(self.encoding)][self.place])
        tensor = inputs[self.column]
        if self.kind == "float":
            return tensor
        missing = np.int8(-1) if self.kind == "bool" else np.int64(INT64_NULL)
        null = graph.op("Equal", tensor, graph.constant(missing, "null"))
        nan = graph.constant(np.float32("nan"), "nan")
        return graph.op("Where", null, nan, graph.op("Cast", tensor, to=_FLOAT))

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> str:
        """float32[batch] after the steps, NaN for null."""
        if not self.steps:
            return self.start_to_onnx(graph, inputs, {})
        axis = graph.constant(np.asarray([1], np.int64), "axis")
        values = graph.op("Unsqueeze", self.start_to_onnx(graph, inputs, {}), axis)
        null: str | None = graph.op("IsNaN", values)
        for step in self.steps:
            values, null = step.to_onnx(graph, values, null, [step])
        if null is not None:
            values = graph.op("Where", null, graph.constant(np.float32("nan"), "nan"), values)
        return graph.op("Squeeze", values, axis)

    def describe(self) -> str:
        parts = [] if self.encoding is None else [self.encoding.describe()]
        return "; ".join([*parts, *(step.describe() for step in self.steps)])


def through(steps: Sequence[NumericStep], values: Floats) -> Floats:
    for step in steps:
        values = step.transform(values)
    return values


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
