"""A run's state in the store while several hosts train: the first host copies its checkpoints there, and the
first host of the next round fetches the one that the round names."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.errors import StoreError
from serin.store.checkpoints import (
    checkpoint_names,
    fetch_checkpoint,
    publish_checkpoint,
    remove_checkpoint,
)
from serin.store.objects import Objects
from serin.store.store import Store
from serin.training.launch.job import choices_file, result_folder
from serin.training.launch.together.round import Round

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_RESULT = "result"


class SharedRun:
    """`folder`: the run's folder on this host. `name`: the run's name, the same on all hosts."""

    def __init__(self, store: Store, objects: Objects, name: str, folder: Path) -> None:
        self._store, self._objects, self._name, self._folder = store, objects, name, folder

    def newest_step(self) -> int:
        return max(self._stored_steps(), default=0)

    def choices(self) -> str | None:
        found = self._objects.read(self._choices_key)
        return None if found is None else found.content.decode()

    def prepare(self, round_: Round, *, first: bool) -> None:
        """Makes the folder what the round says: its choices and, on the host of rank 0, its checkpoint and no later
        one. The other ranks get the checkpoint from rank 0."""
        shutil.rmtree(
            result_folder(self._folder), ignore_errors=True
        )  # of a round that could not report its end
        if round_.choices is None:
            choices_file(self._folder).unlink(missing_ok=True)
        else:
            choices_file(self._folder).write_text(round_.choices)
        for step in self._local_steps():
            if step > round_.step or not first:
                shutil.rmtree(self._place(step))
        if first and round_.step:
            self._fetch(round_.step)
            state = json.loads((self._place(round_.step) / "state.json").read_text())
            if state["best_step"] is not None:
                self._fetch(state["best_step"])

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Copies choices and checkpoints to the store as they are written, during the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._mirror, args=(ended,), name="mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def publish_result(self) -> None:
        publish_checkpoint(self._store, f"{self._name}/{_RESULT}", result_folder(self._folder))
        for step in self._stored_steps():  # no round begins any more
            remove_checkpoint(self._store, self._named(step))

    def fetch_result(self, folder: Path) -> bool:
        """The result in `folder`; False when the store has none."""
        target = result_folder(folder)
        return target.exists() or fetch_checkpoint(self._store, f"{self._name}/{_RESULT}", target)

    def _mirror(self, ended: threading.Event) -> None:
        copied, chosen = set(self._stored_steps_or_none()), ""
        while True:
            last = ended.is_set()
            try:
                chosen = self._copy_choices(chosen)
                steps = set(self._local_steps())
                for step in sorted(steps - copied):
                    publish_checkpoint(self._store, self._named(step), self._place(step))
                    copied.add(step)
                for step in sorted(copied - steps):
                    if steps and step < max(steps):
                        remove_checkpoint(self._store, self._named(step))
                    copied.discard(step)
            except StoreError as error:
                logger.info("%s", error)
            except FileNotFoundError:
                continue  # an old checkpoint was removed in the meantime
            if last:
                return
            ended.wait(_LOOK_S)

    def _copy_choices(self, before: str) -> str:
        file = choices_file(self._folder)
        now = file.read_text() if file.exists() else ""
        if now and now != before:
            self._objects.put(self._choices_key, now.encode())
        return now

    def _stored_steps_or_none(self) -> list[int]:
        try:
            return self._stored_steps()
        except StoreError:
            return []

    def _stored_steps(self) -> list[int]:
        names = checkpoint_names(self._store, f"{self._name}/step-")
        return [int(name.rpartition("step-")[2]) for name in names]

    def _local_steps(self) -> list[int]:
        found = (self._folder / "checkpoints").glob("step-*/COMPLETE")
        return [int(path.parent.name.removeprefix("step-")) for path in found]

    def _fetch(self, step: int) -> None:
        self._place(step).parent.mkdir(exist_ok=True)
        if not fetch_checkpoint(self._store, self._named(step), self._place(step)):
            raise FileNotFoundError(f"the store has no checkpoint of step {step} of {self._name}")

    def _place(self, step: int) -> Path:
        return self._folder / "checkpoints" / f"step-{step:08d}"

    def _named(self, step: int) -> str:
        return f"{self._name}/step-{step:08d}"

    @property
    def _choices_key(self) -> str:
        return f"trainings/{self._name}/choices.json"
