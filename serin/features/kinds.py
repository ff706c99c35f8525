"""Checks that the steps of a spec can work on the kinds of the tables' columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serin.errors import SpecError
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec
from serin.spec.steps.step import NUMBERS, TIMES, VALUES, FeatureStep


def check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> None:
    """Raises SpecError with every feature whose steps cannot work on its column's kind."""
    problems = []
    for index, feature in enumerate(features):
        for column in feature.columns:
            text = _misfit(feature.steps[0], kinds[column])
            if text:
                problems.append((f"features[{index}]", f"column {column!r} is a {kinds[column]}: {text}"))
        for step in feature.steps if feature.columns else ():
            problems += [(f"features[{index}]", text) for text in step.misfits(feature.columns, kinds)]
    if problems:
        raise SpecError(where="features do not fit the tables", problems=problems)


def _misfit(step: FeatureStep, kind: Kind) -> str | None:
    accepted = step.accepted()
    if kind in accepted:
        return step.misfit(kind)
    if set(accepted) == set(TIMES):
        return f"{step.label} needs a time; store the column as a timestamp"
    if kind == "timestamp":
        if set(NUMBERS) <= set(accepted):
            return f"{step.label} needs a number; use date_parts or cyclical"
        return f"take its date_parts instead of {step.label}"
    if set(accepted) == set(VALUES):
        return f"{step.label} needs strings or integers; store it as integers or strings, or bucketize it"
    advice = "categorify gives null a separate code" if step.fills else "use categorify"
    return f"{step.label} needs a number; {advice}, or store the column as numbers"
