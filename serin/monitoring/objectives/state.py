"""What a model's live version promises, `<home>/watch/objectives/<model>.json`, for readers that have no store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from serin.machine.durable import write_whole
from serin.machine.private import make_private
from serin.monitoring.objectives.burn import Objective

FORMAT, VERSION = "serin.objectives", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectivesState:
    """`release`: the live one, whose promises these are."""

    model: str
    release: str = ""
    objectives: tuple[Objective, ...] = ()

    @classmethod
    def load(cls, home: Path, model: str) -> Self:
        """A missing or damaged file is an empty state: the next tick of the watcher writes it."""
        try:
            return cls._from_json(json.loads(_path(home, model).read_bytes()), model)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(model=model)

    def save(self, home: Path) -> None:
        path = _path(home, self.model)
        make_private(path.parent)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "release": self.release,
            "objectives": [asdict(each) for each in self.objectives],
        }
        write_whole(path, json.dumps(content, indent=1))

    @classmethod
    def _from_json(cls, value: Mapping[str, Any], model: str) -> Self:
        if (value["format"], value["version"]) != (FORMAT, VERSION):
            raise ValueError("not a state of objectives")
        return cls(
            model=model,
            release=value["release"],
            objectives=tuple(Objective(**each) for each in value["objectives"]),
        )


def _path(home: Path, model: str) -> Path:
    return home / "watch" / "objectives" / f"{model}.json"
