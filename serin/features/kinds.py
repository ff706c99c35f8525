"""Whether the steps of a spec can work on the kinds of columns that the tables really have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from serin.errors import SpecError
from serin.formats.schema import Kind
from serin.spec import steps as spec
from serin.spec.features import FeatureSpec
from serin.spec.step import Step


def check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> None:
    """SpecError with every feature whose steps cannot work on its column's kind."""
    problems = []
    for index, feature in enumerate(features):
        for column in feature.columns:
            text = _misfit(feature.steps[0], kinds[column])
            if text:
                problems.append((f"features[{index}]", f"column {column!r} is a {kinds[column]}: {text}"))
        problems += [(f"features[{index}]", text) for text in _misfits_within(feature, kinds)]
    if problems:
        raise SpecError(where="features do not fit the tables", problems=problems)


def _misfit(step: Step, kind: Kind) -> str | None:
    if kind in step.accepted():
        if isinstance(step, spec.Ordinal) and step.order is not None:
            text = isinstance(step.order[0], str)
            if text != (kind == "string"):
                return f"the order holds {'text' if text else 'numbers'}"
        return None
    if set(step.accepted()) == set(spec.TIMES):
        return f"{step.label} needs a time; store the column as a timestamp"
    if kind == "timestamp":
        if set(spec.NUMBERS) <= set(step.accepted()):
            return f"{step.label} needs a number; use date_parts or cyclical"
        return f"take its date_parts instead of {step.label}"
    if set(step.accepted()) == set(spec.VALUES):
        return f"{step.label} needs text or whole numbers; store it as integers or text, or bucketize it"
    advice = (
        "categorify gives null a code of its own" if isinstance(step, spec.FillStep) else "use categorify"
    )
    return f"{step.label} needs a number; {advice}, or store the column as numbers"


def _misfits_within(feature: FeatureSpec, kinds: Mapping[str, Kind]) -> Iterator[str]:
    first = feature.steps[0]
    joint = isinstance(first, spec.Categorify) and first.joint
    if joint and len({kinds[column] == "string" for column in feature.columns}) > 1:
        yield "a joint vocabulary needs columns of one kind: all text, or all whole numbers"
    for step in feature.steps:
        if isinstance(step, spec.GroupStats) and kinds[step.by] not in spec.VALUES:
            yield f"group_stats by {step.by!r}: a {kinds[step.by]} is no key; give text or whole numbers"
