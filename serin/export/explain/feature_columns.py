"""Traces every feature to the raw column that it is made of.

A request column and a column of a lookup are raw. A derived column that reads a single raw column belongs to it; one
that reads several is its own column, because its effect cannot be divided among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serin.features.plan import FeaturePlan
from serin.formats.dataset import DatasetDescription, DerivedDescription
from serin.formats.explain import FeatureColumns


def trace_features(plan: FeaturePlan, data: DatasetDescription) -> FeatureColumns:
    """The raw column of every feature of the plan, in the order of the model's inputs."""
    derived = {each.name: each for each in data.derived}
    numeric = [_owner(feature.columns, derived) for feature in plan.numbers]
    categorical = [_owner(feature.columns, derived) for feature in plan.categories for _ in feature.outputs]
    named = dict.fromkeys((*numeric, *categorical))
    return FeatureColumns(
        numeric=tuple(numeric),
        categorical=tuple(categorical),
        sources={name: _source(name, data, derived) for name in named},
    )


def _owner(columns: Iterable[str], derived: Mapping[str, DerivedDescription]) -> str:
    names = sorted(columns)
    roots = {root for name in names for root in _roots(name, derived)}
    return roots.pop() if len(roots) == 1 else " and ".join(names)


def _roots(name: str, derived: Mapping[str, DerivedDescription]) -> set[str]:
    """The raw columns that a column is made of; a raw one is made of itself."""
    if name not in derived:
        return {name}
    return {root for read in derived[name].kinds for root in _roots(read, derived)}


def _source(name: str, data: DatasetDescription, derived: Mapping[str, DerivedDescription]) -> str:
    if name in derived:
        return f"derived: {derived[name].expression}"
    for table in data.lookups:
        if name in table.columns:
            return f"lookup in {table.name} by {table.key}"
    return "request"
