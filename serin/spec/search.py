"""The section `search`: which settings `serin search` tries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from serin.errors import nearest
from serin.spec.kind_settings import USED_BY, unused
from serin.spec.model import ModelSpec
from serin.spec.section import CountOrAuto, Duration, Section
from serin.spec.split import SplitSpec
from serin.spec.training import TrainingSpec

_SECTIONS: dict[str, type[Section]] = {"model": ModelSpec, "training": TrainingSpec}
_OPTIONS = "model.options."  # arguments of your own network: any name is allowed there


class RangeSpec(Section):
    """The values to try for one setting. Give exactly one of the keys."""

    uniform: tuple[float, float] | None = None
    """A number between these two, uniformly distributed."""
    log: tuple[float, float] | None = None
    """A number between these two positive ones, log-uniformly distributed."""
    integer: tuple[int, int] | None = None
    """An integer between these two, both included."""
    choice: tuple[JsonValue, ...] | None = None
    """One of these values."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        given = [name for name in ("uniform", "log", "integer", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give one of uniform: [low, high], log: [low, high], integer: [low, high], choice: [...]; "
                f"given: {', '.join(given) or 'none'}"
            )
        if self.choice is not None:
            if len(self.choice) < 2:
                raise ValueError("choice needs at least two values to choose from")
            return self
        low, high = self.ends
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"[{low:g}, {high:g}]: the first must be smaller than the second")
        if self.log is not None and low <= 0:
            raise ValueError(f"[{low:g}, {high:g}]: a log range must be above 0")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        ends = self.uniform or self.log or self.integer
        assert ends is not None
        return ends

    def samples(self) -> tuple[JsonValue, ...]:
        """Values that must all be allowed for the range to make sense."""
        return self.choice if self.choice is not None else tuple(self.ends)


class SearchSpec(Section):
    """Which settings `serin search` tries, and for how long. Other commands do not read this section."""

    space: dict[str, RangeSpec] = Field(min_length=1)
    """Setting -> the values to try. A setting is named by its place in the spec, such as `model.dropout`."""
    trials: int = Field(default=30, ge=1)
    """The number of combinations to try."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How combinations are chosen: by what worked so far (`tpe`), at random, or all of them (`grid`)."""
    pruner: Literal["halving", "none"] = "halving"
    """Whether the worse trials are stopped early (successive halving)."""
    budget: Duration | None = Field(default=None, gt=0)
    """No trial starts later than this. By default no limit."""
    folds: int = Field(default=1, ge=1)
    """The number of consecutive time blocks that trials are judged by. The newest one is the valid split."""
    parallel: CountOrAuto = "auto"
    """The number of trials that run at the same time. `auto` means one per GPU, or one on a CPU."""
    seed: int = 0
    """The seed of the sampler."""

    @model_validator(mode="after")
    def _grid_can_be_enumerated(self) -> Self:
        endless = [path for path, values in self.space.items() if values.uniform or values.log]
        if self.sampler == "grid" and endless:
            raise ValueError(
                f"sampler: grid tries every combination, and {', '.join(endless)} has no end of values; "
                "write choice: [...] or use tpe"
            )
        return self

    def problems(
        self, model: ModelSpec, training: TrainingSpec, kinds: tuple[str, ...]
    ) -> Iterator[tuple[str, str]]:
        """What of the space does not fit the sections it changes, one setting at a time. `kinds`: of model, that are
        tried."""
        for path, values in self.space.items():
            key = f"search.space.{path}"
            section, _, name = path.partition(".")
            if path.startswith(_OPTIONS):
                path, name = "model.options", "options"
            if path in USED_BY and (problem := unused(path, kinds)):
                yield key, problem
                continue
            if name == "options":
                continue
            if section not in _SECTIONS or name not in _SECTIONS[section].model_fields:
                known = [f"{part}.{field}" for part, kind in _SECTIONS.items() for field in kind.model_fields]
                yield key, f"there is no such setting{nearest(path, known)}"
                continue
            for value in values.samples():
                try:
                    with_values(model, training, {path: value})
                except ValidationError as error:
                    yield key, f"{value!r} is refused: {_first(error)}"
                    break


def with_values(
    model: ModelSpec, training: TrainingSpec, values: Mapping[str, JsonValue]
) -> tuple[ModelSpec, TrainingSpec]:
    """The two sections with `values` (by their place in the spec) put in. ValidationError when they do not fit."""
    raw: dict[str, dict[str, Any]] = {
        "model": model.model_dump(exclude_unset=True),
        "training": training.model_dump(exclude_unset=True),
    }
    for path, value in values.items():
        section, *inner, last = path.split(".")
        place = raw[section]
        for name in inner:
            place[name] = dict(place.get(name) or {})
            place = place[name]
        place[last] = value
    return ModelSpec.model_validate(raw["model"]), TrainingSpec.model_validate(raw["training"])


def fold_splits(split: SplitSpec, folds: int) -> tuple[SplitSpec, ...]:
    """The split itself, and the same moved into the past by one block of valid rows after the other.

    What comes after a moved block is called "test" there; a search looks at no split's test rows.
    """
    left = split.train - (folds - 1) * split.valid
    if left <= 0:
        most = math.ceil(split.train / split.valid) - 1
        raise ValueError(f"no rows are left to train on before the earliest block; at most {most} folds fit")
    return tuple(
        split.model_copy(
            update={
                "train": round(split.train - back * split.valid, 9),
                "test": round(split.test + back * split.valid, 9),
            }
        )
        for back in range(folds)
    )


def _first(error: ValidationError) -> str:
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
