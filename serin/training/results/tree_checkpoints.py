"""Checkpoints of trees: `checkpoints/step-00000050/{trees.ubj, state.json, COMPLETE}`, the last two kept.

state.json has the digest of the trees, and COMPLETE is written last; a checkpoint that does not match is skipped. Does
not import torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serin.errors import CheckpointBroken, StoreNotWritable
from serin.machine.durable import write_whole
from serin.training.launch.job import checkpoint_folder, saved_steps

_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The trees after some rounds. `best`: the valid metric at `best_round`; None without valid rows."""

    rounds: int = 0
    trees: bytes = b""
    best_round: int = 0
    best: float | None = None


class TreeCheckpoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self, note: Callable[[str], None]) -> Grown | None:
        for step in reversed(saved_steps(self._folder)):
            try:
                return _read(checkpoint_folder(self._folder, step))
            except CheckpointBroken as error:
                note(f"{error}; using the one before")
        return None

    def save(self, grown: Grown) -> None:
        place = checkpoint_folder(self._folder, grown.rounds)
        state = {
            "format": "serin.trees",
            "version": 1,
            "rounds": grown.rounds,
            "best_round": grown.best_round,
            "best": grown.best,
            "sha256": hashlib.sha256(grown.trees).hexdigest(),
        }
        try:
            place.mkdir(parents=True, exist_ok=True)
            write_whole(place / "trees.ubj", grown.trees)
            write_whole(place / "state.json", json.dumps(state) + "\n")
            write_whole(place / "COMPLETE", "")
        except OSError as error:
            raise StoreNotWritable(path=str(place), reason=str(error)) from error
        for old in saved_steps(self._folder)[:-_KEPT]:
            shutil.rmtree(checkpoint_folder(self._folder, old), ignore_errors=True)


def _read(place: Path) -> Grown:
    try:
        state = json.loads((place / "state.json").read_text())
        trees = (place / "trees.ubj").read_bytes()
        if hashlib.sha256(trees).hexdigest() != state["sha256"]:
            raise ValueError("trees.ubj does not match its digest")
        return Grown(
            rounds=int(state["rounds"]), trees=trees, best_round=int(state["best_round"]), best=state["best"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointBroken(path=place, reason=str(error)) from error
