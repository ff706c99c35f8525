"""Fits the chains of a spec: from steps as they are written to features as they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serin.features.aggregates.aggregate import Fit, together
from serin.features.aggregates.distribution import Distribution, measure_distribution
from serin.features.codes import CategoricalFeature
from serin.features.fitted import CategoricalStep, Encoding
from serin.features.missing import Missing
from serin.features.numbers import Numbers
from serin.features.ops.bucketize import Bucketize
from serin.features.ops.categorify import Categorify
from serin.features.ops.clip import Clip
from serin.features.ops.count_encode import CountEncode
from serin.features.ops.cyclical import Cyclical, CyclicalParts
from serin.features.ops.date_parts import DateParts
from serin.features.ops.fill_median import FillMedian
from serin.features.ops.fill_missing import FillMissing
from serin.features.ops.fill_mode import FillMode
from serin.features.ops.group_stats import GroupStats
from serin.features.ops.hash_bucket import HashBucket
from serin.features.ops.log1p import Log1p
from serin.features.ops.min_max import MinMax
from serin.features.ops.normalize import Normalize
from serin.features.ops.one_hot import OneHot
from serin.features.ops.ordinal import Ordinal
from serin.features.ops.robust_scale import RobustScale
from serin.features.ops.target_encode import TargetEncode
from serin.features.own import OwnCodes, OwnNumbers, fit_operator
from serin.formats.schema import Kind
from serin.spec import steps as spec
from serin.spec.features import FeatureSpec
from serin.spec.parse_steps import Own
from serin.spec.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    name: str
    numbers: Numbers

    @property
    def columns(self) -> Mapping[str, Kind]:
        return self.numbers.columns


Feature = NumericFeature | CategoricalFeature


def fit_feature(feature: FeatureSpec, kinds: Mapping[str, Kind], classes: int) -> list[Fit[list[Feature]]]:
    """One fit per column, each of which may make several features."""
    first = feature.steps[0]
    if isinstance(first, spec.Categorify) and first.joint:
        return [_fit_joint(feature, first, kinds)]
    return [_Chain(column, kinds, classes).fit(feature.steps) for column in feature.columns]


def _fit_joint(feature: FeatureSpec, step: spec.Categorify, kinds: Mapping[str, Kind]) -> Fit[list[Feature]]:
    codes = yield from Categorify.fit(step, feature.columns)
    made: list[Feature] = []
    for column in feature.columns:
        found = CategoricalFeature(column=column, kind=kinds[column], step=codes)
        made += _one_hot(found) if len(feature.steps) > 1 else [found]
    return made


@dataclass(frozen=True, slots=True)
class _Chain:
    column: str
    kinds: Mapping[str, Kind]
    classes: int

    @property
    def kind(self) -> Kind:
        return self.kinds[self.column]

    def fit(self, steps: Sequence[Step]) -> Fit[list[Feature]]:
        first = steps[0]
        if isinstance(first, spec.Ordinal | spec.CountEncode | spec.TargetEncode | spec.OneHot):
            encoding = yield from self._value_encoding(first)
            return (yield from self._encoded(encoding, steps[1:]))
        if isinstance(first, spec.Cyclical) and first.parts is not None:
            parts = CyclicalParts(column=self.column, parts=first.parts)
            return (yield from self._encoded(parts, steps[1:]))
        if isinstance(first, Own) and first.operator.reads == "column":
            return (yield from self._own(first, None, steps[1:]))
        if isinstance(first, spec.Categorify | spec.HashBucket | spec.DateParts):
            codes = yield from self._codes(first)
            return self._coded(codes, None, steps[1:])
        return (yield from self._numbers(Numbers(column=self.column, kind=self.kind), steps))

    def _value_encoding(self, step: Step) -> Fit[Encoding]:
        if isinstance(step, spec.Ordinal):
            return (yield from Ordinal.fit(step, self.column, self.kind))
        if isinstance(step, spec.CountEncode):
            return (yield from CountEncode.fit(self.column, self.kind))
        if isinstance(step, spec.TargetEncode):
            return (yield from TargetEncode.fit(step, self.column, self.kind, self.classes))
        assert isinstance(step, spec.OneHot)
        codes = yield from Categorify.fit(step, [self.column])
        return OneHot.of(CategoricalFeature(column=self.column, kind=self.kind, step=codes))

    def _codes(self, step: spec.Categorify | spec.HashBucket | spec.DateParts) -> Fit[CategoricalStep]:
        if isinstance(step, spec.HashBucket):
            return HashBucket(step.buckets)
        if isinstance(step, spec.DateParts):
            return DateParts(step.parts)
        return (yield from Categorify.fit(step, [self.column]))

    def _coded(self, step: CategoricalStep, numbers: Numbers | None, rest: Sequence[Step]) -> list[Feature]:
        codes = CategoricalFeature(column=self.column, kind=self.kind, step=step, numbers=numbers)
        return _one_hot(codes) if rest else [codes]

    def _encoded(self, encoding: Encoding, rest: Sequence[Step]) -> Fit[list[Feature]]:
        """Every output of an encoding goes through the steps that follow, by its own numbers."""
        outputs = [
            Numbers(column=self.column, kind=self.kind, encoding=encoding, place=place)
            for place in range(len(encoding.outputs()))
        ]
        if not rest:
            return [NumericFeature(name=numbers.name, numbers=numbers) for numbers in outputs]
        made = yield from together([self._numbers(numbers, rest) for numbers in outputs])
        return [feature for features in made for feature in features]

    def _numbers(self, numbers: Numbers, steps: Sequence[Step]) -> Fit[list[Feature]]:
        data = yield from measure_distribution(numbers)
        beside: list[Feature] = []
        for place, step in enumerate(steps):
            rest = steps[place + 1 :]
            if isinstance(step, spec.FillStep) and step.indicator:
                missing = data.numbers.after(Missing())
                beside.append(NumericFeature(name=f"{numbers.name}_missing", numbers=missing))
            if isinstance(step, spec.NumberStep):
                data = yield from _fit_number(step, data)
            else:
                turned = yield from self._turned(step, data, rest)
                return turned + beside
        return [NumericFeature(name=numbers.name, numbers=data.numbers), *beside]

    def _turned(self, step: Step, data: Distribution, rest: Sequence[Step]) -> Fit[list[Feature]]:
        """What becomes of numbers by a step that makes something else of them."""
        if isinstance(step, spec.Bucketize):
            buckets = yield from Bucketize.fit(step, data)
            return self._coded(buckets, data.numbers, rest)
        if isinstance(step, spec.GroupStats):
            stats = yield from GroupStats.fit(step, data, self.kinds[step.by])
            return (yield from self._encoded(stats, rest))
        if isinstance(step, spec.Cyclical):
            assert step.period is not None
            turned = Cyclical(inner=data.numbers, period=step.period)
            return (yield from self._encoded(turned, rest))
        assert isinstance(step, Own), step
        return (yield from self._own(step, data.numbers, rest))

    def _own(self, step: Own, numbers: Numbers | None, rest: Sequence[Step]) -> Fit[list[Feature]]:
        operator: Any = yield from fit_operator(step, self.column, numbers)
        if step.made == "codes":
            return self._coded(OwnCodes(path=step.path, operator=operator), numbers, rest)
        own = OwnNumbers(path=step.path, operator=operator, column=self.column, kind=self.kind, inner=numbers)
        return (yield from self._encoded(own, rest))


def _fit_number(step: spec.NumberStep, data: Distribution) -> Fit[Distribution]:
    match step:
        case spec.FillMissing():
            return FillMissing.given(step, data)
        case spec.FillMedian():
            return (yield from FillMedian.fit(data))
        case spec.FillMode():
            return (yield from FillMode.fit(data))
        case spec.Clip():
            return (yield from Clip.fit(step, data))
        case spec.Log1p():
            return data.after(Log1p())
        case spec.Normalize():
            return (yield from Normalize.fit(data))
        case spec.MinMax():
            return (yield from MinMax.fit(data))
    assert isinstance(step, spec.RobustScale), step
    return (yield from RobustScale.fit(step, data))


def _one_hot(codes: CategoricalFeature) -> list[Feature]:
    encoding = OneHot.of(codes)
    made = (
        Numbers(column=codes.column, kind=codes.kind, encoding=encoding, place=place)
        for place in range(len(encoding.outputs()))
    )
    return [NumericFeature(name=numbers.name, numbers=numbers) for numbers in made]
