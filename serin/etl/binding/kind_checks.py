"""Checks that a spec's use of its columns fits their kinds: steps of features, keys, times and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serin.errors import SpecError
from serin.etl.binding.problems import Problems
from serin.etl.sources.odd_texts import odd_text
from serin.etl.sources.tables import Table
from serin.formats.schema import Kind
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.steps.step import NUMBERS, TIMES, VALUES, FeatureStep


def check_all_kinds(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    kinds: Mapping[str, Kind],
    main: Table | None,
    problems: Problems,
) -> None:
    """Collects what does not fit. A column without a kind is passed over."""
    with problems.catching():
        _check_kinds(_with_known_columns(features, kinds), kinds, main)
    _check_keys(data, kinds, problems)
    _check_rows(data, features, kinds, problems)


def _with_known_columns(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind]) -> list[FeatureSpec]:
    """The features, each with the columns whose kinds are known; its place stays the same."""
    known = []
    for feature in features:
        columns = tuple(column for column in feature.columns if column in kinds)
        extra = set(feature.inputs) - set(feature.columns)
        known.append(feature.model_copy(update={"columns": columns if extra <= kinds.keys() else ()}))
    return known


def _check_kinds(features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], main: Table | None) -> None:
    """Raises SpecError, with the value that makes a column a string, where there is one."""
    try:
        check_kinds(features, kinds)
    except SpecError as error:
        if main is None:
            raise
        named = dict.fromkeys(column for feature in features for column in feature.columns)
        texts = [name for name in named if kinds[name] == "string" and name in main.types]
        files = dict.fromkeys(group.file for group in main.groups)
        stored = {name: main.name_in_file(name) for name in texts}
        reasons = {
            name: next(filter(None, (odd_text(file, stored[name]) for file in files)), None) for name in texts
        }
        problems = [(f"column {name!r}", why) for name, why in reasons.items() if why]
        raise SpecError(
            where="features do not fit the tables", problems=[*error.fields["problems"], *problems]
        ) from error


def _check_rows(
    data: DataSpec, features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], problems: Problems
) -> None:
    """Checks fit the kinds of their columns. Statistics are kept of what features are made of, and of no times: nothing
    else can be compared with the dataset before."""
    kept = {column for feature in features for column in feature.columns}
    for index, check in enumerate(data.checks):
        if check.column is None or check.column not in kinds:
            continue
        kind = kinds[check.column]
        found = list(check.misfits(kind))
        if check.compares and (check.column not in kept or kind == "timestamp"):
            found.append(
                f"{check.column!r} is not a feature (or is a time), so there are no statistics to compare"
            )
        for text in found:
            problems.add(SpecError(where="data", problems=[(f"data.checks[{index}]", text)]))


def _check_keys(data: DataSpec, kinds: Mapping[str, Kind], problems: Problems) -> None:
    """Checks that times are timestamps and keys are not floats."""
    found = []
    time = kinds.get(data.time) if data.time is not None else None
    if time is not None and time not in ("timestamp", "int"):
        found.append(("data.time", f"{data.time!r} is a {time}; a time is a timestamp or an integer"))
    elif time == "int":
        spans = [(f"data.windows[{index}]", w.span or w.delay) for index, w in enumerate(data.windows)]
        for key, span in [*spans, ("data.split.gap", data.split.gap)]:
            if span:
                text = f"{data.time!r} counts in no unit of time; store it as a timestamp, or use rows"
                found.append((key, text))
    keys = [("data.id", data.id), ("data.split.group", data.split.group)]
    keys += [("data.unique.by", column) for column in (data.unique.by if data.unique else ())]
    for index, window in enumerate(data.windows):
        keys += [(f"data.windows[{index}].by", column) for column in window.by]
    for key, column in keys:
        if column is not None and kinds.get(column) == "float":
            found.append(
                (key, f"{column!r} is a float, which cannot be a key; store it as integers or strings")
            )
    for problem in found:
        problems.add(SpecError(where="data does not fit the tables", problems=[problem]))


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
