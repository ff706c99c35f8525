"""Fits the chains of a spec: turns steps as written into fitted features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serin.features.aggregates.aggregate import Fit, together
from serin.features.aggregates.distribution import measure_distribution
from serin.features.fitted import Encoding
from serin.features.numbers import CategoricalFeature, Numbers
from serin.features.operator import Operator, Source
from serin.features.ops.fill import Missing
from serin.features.own import fit_own
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec
from serin.spec.steps.parse import Own
from serin.spec.steps.step import FeatureStep


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    name: str
    numbers: Numbers

    @property
    def columns(self) -> Mapping[str, Kind]:
        return self.numbers.columns


Feature = NumericFeature | CategoricalFeature


def fit_feature(feature: FeatureSpec, kinds: Mapping[str, Kind], classes: int) -> list[Fit[list[Feature]]]:
    """Returns one fit per column, each of which may make several features; one for all columns if the operator is
    shared."""
    source = Source(columns=feature.columns, kinds=kinds, classes=classes)
    if feature.steps[0].shared:
        return [_fit_shared(source, feature.steps)]
    return [_fit_column(replace(source, columns=(column,)), feature.steps) for column in feature.columns]


def _fit_shared(source: Source, steps: Sequence[FeatureStep]) -> Fit[list[Feature]]:
    fitted = yield from _fit_step(steps[0], source)
    made: list[Feature] = []
    for column in source.columns:
        made += yield from _continue(steps, fitted, replace(source, columns=(column,)))
    return made


def _fit_column(source: Source, steps: Sequence[FeatureStep]) -> Fit[list[Feature]]:
    if steps[0].reads_numbers:
        return (yield from _fit_numbers(Numbers(column=source.column, kind=source.kind), source, steps))
    fitted = yield from _fit_step(steps[0], source)
    return (yield from _continue(steps, fitted, source))


def _fit_numbers(numbers: Numbers, source: Source, steps: Sequence[FeatureStep]) -> Fit[list[Feature]]:
    """Fits numbers through their steps, up to the one that turns them into something else."""
    data = yield from measure_distribution(numbers)
    beside: list[Feature] = []
    for place, step in enumerate(steps):
        missing = data.numbers.after(Missing())
        beside += [NumericFeature(name=name, numbers=missing) for name in step.beside(numbers.name)]
        reached = replace(source, numbers=data)
        fitted = yield from _fit_step(step, reached)
        if not step.monotone:
            made = yield from _continue(steps[place:], fitted, reached)
            return made + beside
        data = data.after(fitted)
    return [NumericFeature(name=numbers.name, numbers=data.numbers), *beside]


def _continue(steps: Sequence[FeatureStep], fitted: Any, source: Source) -> Fit[list[Feature]]:
    """Fits the features of the first of these steps' result, by the steps after it."""
    if steps[0].made != "codes":
        return (yield from _fit_encoded(fitted, source, steps[1:]))
    numbers = None if source.numbers is None else source.numbers.numbers
    codes = CategoricalFeature(column=source.column, kind=source.kind, step=fitted, numbers=numbers)
    if len(steps) == 1:
        return [codes]
    reached = replace(source, numbers=None, codes=codes)
    encoding = yield from _fit_step(steps[1], reached)
    return (yield from _continue(steps[1:], encoding, reached))


def _fit_encoded(encoding: Encoding, source: Source, rest: Sequence[FeatureStep]) -> Fit[list[Feature]]:
    """Fits every output of an encoding through the steps that follow, with its own fits."""
    outputs = [
        Numbers(column=source.column, kind=source.kind, encoding=encoding, place=place)
        for place in range(len(encoding.outputs()))
    ]
    if not rest:
        return [NumericFeature(name=numbers.name, numbers=numbers) for numbers in outputs]
    made = yield from together([_fit_numbers(numbers, source, rest) for numbers in outputs])
    return [feature for features in made for feature in features]


def _fit_step(step: FeatureStep, source: Source) -> Fit[Any]:
    if isinstance(step, Own):
        return (yield from fit_own(step, source))
    assert isinstance(step, Operator), step
    return (yield from step.fit(source))
