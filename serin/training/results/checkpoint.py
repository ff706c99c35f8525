"""Checkpoints that are complete or ignored: `checkpoints/step-00001200/{state.safetensors, state.json, COMPLETE}`.

state.json has the digest of the tensors and COMPLETE that of state.json; both are verified before anything is read. A
thread writes them while training continues. The last two are kept, and for each of them the best epoch it knows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from serin.errors import CheckpointBroken, StoreNotWritable
from serin.formats.trained import file_sha256
from serin.formats.weights import save_tensors
from serin.machine.durable import sync
from serin.training.launch.job import checkpoint_folder, saved_steps

TENSORS, STATE, COMPLETE = "state.safetensors", "state.json", "COMPLETE"
_LAST = 2


class EpochRecord(BaseModel):
    """The result of an epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int  # from 1
    step: int  # steps done when it ended
    loss: float  # mean over its steps
    metrics: dict[str, float]


class Position(BaseModel):
    """state.json: the position of the run. RNG states are among the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["serin.checkpoint"] = "serin.checkpoint"
    version: Literal[2] = 2
    step: int = 0  # steps done
    ranks: int = 1
    # Of the current epoch, in 2^-40: integers, so that the sum does not depend on its order.
    loss_sum: int = 0
    epochs: tuple[EpochRecord, ...] = ()
    best_step: int | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    position: Position
    tensors: dict[str, Tensor]


class Checkpoints:
    def __init__(self, folder: Path) -> None:
        self._run, self._folder = folder, folder / "checkpoints"
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def newest(self, note: Callable[[str], None]) -> Saved | None:
        """Returns the last complete checkpoint; broken ones are skipped with a note."""
        for step in reversed(saved_steps(self._run)):
            try:
                return self.read(step)
            except CheckpointBroken as error:
                note(f"{error}; using the one before")
        return None

    def read(self, step: int) -> Saved:
        place = checkpoint_folder(self._run, step)
        try:
            state = (place / STATE).read_bytes()
            if _digest(state) != (place / COMPLETE).read_text().strip():
                raise CheckpointBroken(path=place, reason=f"{STATE} does not match its digest")
            position = Position.model_validate_json(state)
            if file_sha256(place / TENSORS) != position.sha256:
                raise CheckpointBroken(path=place, reason=f"{TENSORS} does not match its digest")
            return Saved(position=position, tensors=load_file(place / TENSORS))
        except (OSError, ValidationError, SafetensorError) as error:
            raise CheckpointBroken(path=place, reason=str(error)) from error

    def save(self, position: Position, tensors: dict[str, Tensor], done: Callable[[], None]) -> None:
        """Writes in the background; `tensors` must be copies. Waits for the previous write and raises its error."""
        self.finish()
        self._pending = self._writer.submit(self._write, position, tensors, done)

    def finish(self) -> None:
        """Waits until the last save is on disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def clear_scratch(self) -> None:
        """Removes leftovers of a killed writer."""
        for place in self._folder.glob(".*"):
            shutil.rmtree(place)

    def _write(self, position: Position, tensors: dict[str, Tensor], done: Callable[[], None]) -> None:
        try:
            self._publish(position, tensors)
            self._forget_old()
        except OSError as error:
            raise StoreNotWritable(path=str(self._folder), reason=str(error)) from error
        done()

    def _publish(self, position: Position, tensors: dict[str, Tensor]) -> None:
        place = checkpoint_folder(self._run, position.step)
        scratch = self._folder / f".{place.name}"
        scratch.mkdir(parents=True)
        save_tensors(tensors, scratch / TENSORS)
        sync(scratch / TENSORS)
        digest = file_sha256(scratch / TENSORS)
        state = position.model_copy(update={"sha256": digest}).model_dump_json(indent=1).encode()
        for name, content in ((STATE, state), (COMPLETE, _digest(state).encode())):
            _write_through(scratch / name, content)
        sync(scratch)
        _forget(place)  # present when a run went back behind it because it was broken
        scratch.rename(place)
        sync(self._folder)

    def _forget_old(self) -> None:
        steps = saved_steps(self._run)
        kept = set(steps[-_LAST:])
        for step in steps[-_LAST:]:
            best = json.loads((checkpoint_folder(self._run, step) / STATE).read_text())["best_step"]
            kept |= set() if best is None else {best}
        for step in steps:
            if step not in kept:
                _forget(checkpoint_folder(self._run, step))


def _forget(place: Path) -> None:
    if place.exists():
        (place / COMPLETE).unlink(missing_ok=True)  # first, so that a partial one never counts
        shutil.rmtree(place)


def _write_through(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
