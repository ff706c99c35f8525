"""The outcome of trainings: the versions that were made of them, and how the rollouts of these ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.errors import SerinError
from serin.rollout.run.access import Rollouts, find_rollouts
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import ModelStatus, status_of
from serin.store.store import Store

_MOST_VERSIONS: Final = 200  # of a model, that are looked through for their training


@dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """A version that was made of a training, and what its last rollout came to."""

    model: str
    version: int
    outcome: str
    badge: str


def outcomes_of(home: Path, models: Iterable[str]) -> tuple[dict[str, tuple[Became, ...]], list[str]]:
    """Returns by training the versions that were made of it; and what cannot be read."""
    found: dict[str, tuple[Became, ...]] = {}
    troubles: list[str] = []
    for model in sorted(models):
        try:
            for run, each in _versions(home, model):
                found[run] = (*found.get(run, ()), each)
        except (SerinError, OSError) as error:
            troubles.append(f"the outcome of the trainings of {model} cannot be read: {error}")
    return found, troubles


def _versions(home: Path, model: str) -> list[tuple[str, Became]]:
    store = Store.open()
    made = {
        version: run
        for version in store.versions(model)[-_MOST_VERSIONS:]
        if (run := training_of(store, model, version))
    }
    outcomes = _outcomes(find_rollouts(home), model) if made else {}
    return [
        (run, Became(model=model, version=version, outcome=outcome, badge=badge))
        for version, run in made.items()
        for outcome, badge in [outcomes.get(version, ("never rolled out", "off"))]
    ]


_TRAININGS: dict[tuple[str, str, int], str] = {}  # versions never change


def training_of(store: Store, model: str, version: int) -> str:
    """Returns the training that a version was made of; empty for one from elsewhere or whose manifest is damaged."""
    key = store.url, model, version
    if key not in _TRAININGS:
        content = store.read_file(model, version, "manifest.json")
        try:
            _TRAININGS[key] = str(json.loads(content or b"{}").get("lineage", {}).get("training") or "")
        except (ValueError, AttributeError):
            return ""
    return _TRAININGS[key]


_ENDED: dict[tuple[str, str], tuple[str, dict[int, str]]] = {}


def _outcomes(rollouts: Rollouts, model: str) -> dict[int, tuple[str, str]]:
    """Returns by version what its last rollout came to, and the badge for it."""
    state = status_of(rollouts, model)
    if state is None:
        return {}
    key = rollouts.objects.url, model
    known, phases = _ENDED.get(key, ("", {}))
    if known != state.rollout.id:
        rolled = (decision2rollout(each) for each in rollouts.decisions(model))
        phases = {now.candidate.version: now.phase.value for now in rolled if now.candidate.edition == 1}
        _ENDED[key] = state.rollout.id, phases
    return {version: _outcome(state, version, phase) for version, phase in phases.items()}


def _outcome(state: ModelStatus, version: int, phase: str) -> tuple[str, str]:
    """An edition of a version's lookups is not an outcome of its training."""
    now = state.rollout
    own = (now.version, now.edition) == (version, 1)
    if own and now.running:
        return f"{now.phase.replace('_', ' ')} {now.weight_percent:g}%", "going"
    if own:
        phase = now.phase
    if state.live == version:
        return "live", "good"
    return phase.replace("_", " "), {"promoted": "good", "rolled_back": "bad"}.get(phase, "off")
