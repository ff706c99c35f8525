"""The fitted features of a dataset: from columns to the arrays a network reads, in numpy and as an ONNX graph.

A number that is still null after its steps becomes 0 at the end: a network never sees NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from serin.errors import SpecError
from serin.features.categorify import Categorify
from serin.features.clip import Clip
from serin.features.column import Column, array_module
from serin.features.date_parts import DateParts
from serin.features.distribution import measure_distribution
from serin.features.fill_median import FillMedian
from serin.features.normalize import Normalize
from serin.features.requests import Answer, Fit, run_fits
from serin.features.steps import CategoricalStep, NumericStep
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import INT64_NULL, Kind
from serin.spec import steps as spec
from serin.spec.features import FeatureSpec

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder

FORMAT, VERSION = "serin.features", 1
_NUMERIC: Mapping[str, Any] = {step.name: step for step in (FillMedian, Clip, Normalize)}
_CATEGORICAL: Mapping[str, Any] = {step.name: step for step in (Categorify, DateParts)}
_BLOCK = 2**15
_FLOAT, _INT64 = 1, 7  # onnx.TensorProto


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    column: str
    kind: Kind
    steps: tuple[NumericStep, ...]

    def transform(self, column: Column) -> npt.NDArray[np.float32]:
        values = column.floats()
        for step in self.steps:
            values = step.transform(values)
        null = np.isnan(values)
        return np.where(null, np.float32(0), values) if null.any() else values

    def floats_to_onnx(self, graph: GraphBuilder, tensor: str) -> str:
        """The column as float32[batch] with NaN for null."""
        if self.kind == "float":
            return tensor
        missing = np.int8(-1) if self.kind == "bool" else np.int64(INT64_NULL)
        null = graph.op("Equal", tensor, graph.constant(missing, "null"))
        return graph.op(
            "Where", null, graph.constant(np.float32("nan"), "nan"), graph.op("Cast", tensor, to=_FLOAT)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalFeature:
    column: str
    kind: Kind
    step: CategoricalStep

    @property
    def outputs(self) -> tuple[CategoricalColumn, ...]:
        return self.step.outputs(self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlan:
    """Numeric features in the order of the spec, categorical ones in the order of the spec."""

    numbers: tuple[NumericFeature, ...]
    categories: tuple[CategoricalFeature, ...]

    @property
    def numeric(self) -> tuple[str, ...]:
        return tuple(feature.column for feature in self.numbers)

    @property
    def categorical(self) -> tuple[CategoricalColumn, ...]:
        return tuple(output for feature in self.categories for output in feature.outputs)

    @property
    def columns(self) -> dict[str, Kind]:
        """The columns that are needed, with their kinds."""
        numbers = {feature.column: feature.kind for feature in self.numbers}
        return numbers | {feature.column: feature.kind for feature in self.categories}

    @classmethod
    def fit(cls, features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], answer: Answer) -> FeaturePlan:
        """`answer` measures and merges requests over the training rows; `check_kinds` has passed."""
        fits = [
            _fit_feature(feature, column, kinds[column]) for feature in features for column in feature.columns
        ]
        fitted = run_fits(fits, answer)
        return cls(
            numbers=tuple(feature for feature in fitted if isinstance(feature, NumericFeature)),
            categories=tuple(feature for feature in fitted if isinstance(feature, CategoricalFeature)),
        )

    def transform(
        self, columns: Mapping[str, Column]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """num float32[n, k] and cat int32[n, m]; on a GPU when any of the columns is there."""
        xp = array_module(*(column.values for column in columns.values()))
        rows = len(next(iter(columns.values())))
        block_rows = _BLOCK if xp is np else max(rows, 1)  # a GPU has no use for small blocks
        num = xp.empty((rows, len(self.numeric)), np.float32)
        for index, number in enumerate(self.numbers):
            start = 0
            for block in columns[number.column].blocks(block_rows):
                num[start : start + len(block), index] = xp.asarray(number.transform(block))
                start += len(block)
        cat = xp.empty((rows, len(self.categorical)), np.int32)
        index = 0
        for feature in self.categories:
            for codes in feature.step.transform(columns[feature.column]):
                cat[:, index] = xp.asarray(codes)
                index += 1
        return num, cat

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, str]:
        """num float32[batch, k] and cat int64[batch, m] from one rank-1 tensor in wire form per column."""
        codes = [
            code
            for feature in self.categories
            for code in feature.step.to_onnx(graph, inputs[feature.column], feature.kind)
        ]
        batch = graph.op("Shape", next(iter(inputs.values())))
        return self._numbers_to_onnx(graph, inputs, batch), _stack(graph, codes, batch, np.int64)

    def _numbers_to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str], batch: str) -> str:
        """Columns with the same steps go through them side by side: few nodes, however many columns."""
        groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for index, feature in enumerate(self.numbers):
            groups.setdefault(tuple(step.shape for step in feature.steps), []).append(index)
        made = []
        for places in groups.values():
            columns = [
                self.numbers[place].floats_to_onnx(graph, inputs[self.numbers[place].column])
                for place in places
            ]
            values = _stack(graph, columns, batch, np.float32)
            null: str | None = graph.op("IsNaN", values)
            for steps in zip(*(self.numbers[place].steps for place in places), strict=True):
                values, null = steps[0].to_onnx(graph, values, null, steps)
            if null is not None:
                values = graph.op("Where", null, graph.constant(np.float32(0), "zero"), values)
            made.append(values)
        if len(made) < 2:
            return made[0] if made else _stack(graph, [], batch, np.float32)
        order = np.argsort(np.concatenate([np.asarray(places) for places in groups.values()]))
        return graph.op(
            "Gather",
            graph.op("Concat", *made, axis=1),
            graph.constant(order.astype(np.int64), "order"),
            axis=1,
        )

    def describe(self) -> list[str]:
        """One line per feature, for people."""
        lines = []
        for number in self.numbers:
            steps = "; ".join(step.describe() for step in number.steps)
            end = "" if any(isinstance(step, FillMedian) for step in number.steps) else "; null becomes 0"
            lines.append(f"{number.column} (numeric): {steps}{end}")
        return lines + [f"{each.column} (categorical): {each.step.describe()}" for each in self.categories]

    def to_json(self) -> dict[str, Any]:
        features: list[dict[str, Any]] = [
            {
                "column": number.column,
                "kind": number.kind,
                "makes": "numeric",
                "steps": [{"step": step.name, **step.to_json()} for step in number.steps],
            }
            for number in self.numbers
        ]
        features += [
            {
                "column": feature.column,
                "kind": feature.kind,
                "makes": "categorical",
                "steps": [{"step": feature.step.name, **feature.step.to_json()}],
            }
            for feature in self.categories
        ]
        return {"format": FORMAT, "version": VERSION, "features": features}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FeaturePlan:
        """The plan, or ValueError with what is wrong."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        numbers, categories = [], []
        for entry in document["features"]:
            known = _NUMERIC if entry["makes"] == "numeric" else _CATEGORICAL
            steps = [known[step["step"]].from_json(step) for step in entry["steps"]]
            where = {"column": entry["column"], "kind": entry["kind"]}
            if entry["makes"] == "numeric":
                numbers.append(NumericFeature(**where, steps=tuple(steps)))
            else:
                categories.append(CategoricalFeature(**where, step=steps[0]))
        return cls(numbers=tuple(numbers), categories=tuple(categories))


def check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> None:
    """SpecError with every feature whose steps cannot work on its column's kind."""
    problems = []
    for index, feature in enumerate(features):
        for column in feature.columns:
            text = _misfit(feature.steps[-1], kinds[column])
            if text:
                problems.append((f"features[{index}]", f"column {column!r} is a {kinds[column]}: {text}"))
    if problems:
        raise SpecError(where="features do not fit the tables", problems=problems)


def _misfit(step: spec.Step, kind: Kind) -> str | None:
    if isinstance(step, spec.DateParts):
        return None if kind == "timestamp" else "date_parts needs a time; store the column as a timestamp"
    if isinstance(step, spec.Categorify):
        if kind == "float":
            return "categorify needs text or whole numbers; store it as integers or text"
        return "take its date_parts instead of categorify" if kind == "timestamp" else None
    if kind == "string":
        return f"{step.name} needs a number; use categorify, or store the column as numbers"
    return f"{step.name} needs a number; use date_parts" if kind == "timestamp" else None


def _fit_feature(feature: FeatureSpec, column: str, kind: Kind) -> Fit[NumericFeature | CategoricalFeature]:
    last = feature.steps[-1]
    if isinstance(last, spec.DateParts):
        return CategoricalFeature(column=column, kind=kind, step=DateParts(last.parts))
    if isinstance(last, spec.Categorify):
        codes = yield from Categorify.fit(last, column)
        return CategoricalFeature(column=column, kind=kind, step=codes)
    data = yield from measure_distribution(column)
    for step in feature.steps:
        if isinstance(step, spec.FillMedian):
            _, data = yield from FillMedian.fit(data)
        elif isinstance(step, spec.Clip):
            _, data = yield from Clip.fit(step, data)
        else:
            assert isinstance(step, spec.Normalize), step
            _, data = yield from Normalize.fit(data)
    return NumericFeature(column=column, kind=kind, steps=data.steps)


def _stack(graph: GraphBuilder, columns: Sequence[str], batch: str, dtype: type[np.generic]) -> str:
    """Rank-1 tensors side by side as [batch, n]; also when n is 0."""
    if not columns:
        shape = graph.op("Concat", batch, graph.constant(np.asarray([0], np.int64), "none"), axis=0)
        import onnx

        value = onnx.numpy_helper.from_array(np.zeros(1, dtype))
        return graph.op("ConstantOfShape", shape, value=value)
    last = graph.constant(np.asarray([1], np.int64), "axis")
    return graph.op("Concat", *(graph.op("Unsqueeze", column, last) for column in columns), axis=1)
