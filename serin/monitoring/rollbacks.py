"""The automatic rollbacks of a model, `<home>/watch/rollbacks/<model>.json`: stored before the controller is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.machine.documents import read_json
from serin.machine.durable import make_private, write_whole
from serin.machine.typed_json import Document
from serin.store.artifacts import Release, version_label

_KEPT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """`command`: its id in the controller's inbox. `outcome`: the controller's answer, None until it is there. The
    editions are those of the versions' lookups."""

    t: float
    from_version: int
    to_version: int
    by: str
    why: str
    command: str
    outcome: str | None = None
    accepted: bool = False
    from_edition: int = 1
    to_edition: int = 1

    @property
    def from_label(self) -> str:
        return version_label(self.from_version, self.from_edition)

    @property
    def to_label(self) -> str:
        return version_label(self.to_version, self.to_edition)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollbacks(Document, form="serin.rollbacks"):
    rollbacks: tuple[Rollback, ...] = ()


def refusal(
    made: tuple[Rollback, ...], *, live: Release | None, previous: Release | None, rollout_runs: bool
) -> str | None:
    """Returns why the live version must not be rolled back automatically, or None. Pure.

    It is only ever exchanged for an older one: so two versions that are both bad never take turns.
    """
    if live is None or previous is None:
        return "no version was live before"
    if rollout_runs:
        return "a rollout is running and decides itself"
    if previous > live:
        return f"version {live.label} is live because of a rollback; a further step is for a person to decide"
    for each in made:
        same = (each.from_version, each.from_edition) == (live.version, live.edition)
        if same and (each.accepted or each.outcome is None):
            once = f"version {live.label} was rolled back automatically once"
            return f"{once}; a second time is for a person to decide"
    return None


def read_rollbacks(home: Path, model: str) -> tuple[Rollback, ...]:
    """Returns the automatic rollbacks of a model, oldest first. Raises FileBroken when they cannot be read: one that
    was made must not be made again."""
    advice = (
        f"restore it, or move it away: then a version of {model} may be rolled back automatically once more"
    )
    return (read_json(_path(home, model), _Rollbacks.from_json, advice=advice) or _Rollbacks()).rollbacks


def save_rollbacks(home: Path, model: str, rollbacks: tuple[Rollback, ...]) -> None:
    path = _path(home, model)
    make_private(path.parent)
    write_whole(path, _Rollbacks(rollbacks=rollbacks[-_KEPT:]).dump())


def _path(home: Path, model: str) -> Path:
    return home / "watch" / "rollbacks" / f"{model}.json"
