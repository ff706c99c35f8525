"""What can be read of a spec with mistakes: its data and features without the entries that are wrong.

`serin check` compares these with the tables, so that one mistake does not hide the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.kind_settings import unused_in
from serin.spec.load import absolute_tables
from serin.spec.pipeline import PipelineSpec
from serin.spec.steps.parse import parse_step
from serin.spec.target import TargetSpec
from serin.spec.yaml_file import read_mapping

_MAKES_NO_NAMES = {
    "target", "time", "id", "split", "checks", "training_only", "allow_leaks", "where", "unique",
}  # fmt: skip
_MOST_ENTRIES = 200

Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSpec:
    """`names_known`: False when an entry that makes columns could not be read, so that a column may seem to be
    missing."""

    data: DataSpec
    features: tuple[FeatureSpec, ...]
    names_known: bool
    unused: tuple[tuple[str, str], ...] = ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """What does not fit together in these sections, and settings that the model's kind does not use."""
        yield from self.unused
        if self.names_known:
            yield from self.data.problems()
            spec = PipelineSpec.model_construct(name="partial", data=self.data, features=self.features)
            yield from spec.feature_problems()


def read_partial(source: Path | Mapping[str, Any]) -> PartialSpec | None:
    """The readable part of a spec; None when there are no tables to compare it with."""
    base = Path.cwd() if isinstance(source, Mapping) else source.absolute().parent
    raw = source if isinstance(source, Mapping) else read_mapping(source)
    given = raw.get("data")
    if not isinstance(given, dict) or not isinstance(given.get("tables"), dict):
        return None
    data, removed = _readable_data(copy.deepcopy(given))
    if data is None:
        return None
    features = raw.get("features")
    return PartialSpec(
        data=absolute_tables(data, base),
        features=tuple(_readable_feature(each) for each in (features if isinstance(features, list) else ())),
        names_known=all(location[0] in _MAKES_NO_NAMES for location in removed),
        unused=tuple(unused_in(raw)),
    )


def _readable_data(raw: dict[str, Any]) -> tuple[DataSpec | None, list[Location]]:
    removed: list[Location] = []
    for _ in range(_MOST_ENTRIES):
        raw.setdefault("target", TargetSpec.model_construct(expressions={}, expression="", task="regression"))
        try:
            return DataSpec.model_validate(raw), removed
        except ValidationError as error:
            location = _remove(raw, error.errors()[0]["loc"])
            if location is None:
                break
            removed.append(location)
    return None, removed


def _remove(raw: dict[str, Any], location: Location) -> Location | None:
    """Removes the innermost entry that an error is about; from a list also what follows, so that positions stay true.
    Where it was; None when it is not there."""
    path: list[Any] = [raw]
    for part in location:
        inner = path[-1]
        known = (isinstance(inner, dict) and part in inner) or (
            isinstance(inner, list) and part in range(len(inner))
        )
        if not known:
            break
        path.append(inner[part])
    if len(path) == 1:
        return None
    last, place = path[-2], location[len(path) - 2]
    if isinstance(last, list):
        del last[int(place) :]
    else:
        del last[place]
    return location[: len(path) - 1]


def _readable_feature(raw: Any) -> FeatureSpec:
    """The feature; one without columns when it cannot be read, so that the others keep their positions."""
    try:
        return FeatureSpec.model_validate(raw)
    except ValidationError:
        return FeatureSpec.model_construct(columns=(), steps=(parse_step("normalize"),))
