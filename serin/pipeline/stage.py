"""The common part of all stages: the result of a stage, and the lock, lease, receipt and reason of its work."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Self, TypeVar

from serin.errors import NotFound
from serin.machine import environment
from serin.machine.leases import Lease, lease
from serin.machine.packages import entered, refuse_other_image
from serin.machine.stopping import stoppable
from serin.pipeline.needs import Needs
from serin.spec.names import Priority
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.checkpoints import fetch_checkpoint, publish_checkpoint
from serin.store.receipt import Measurement, Receipt, measure
from serin.store.runs import hold_run_of, run_folder
from serin.store.stage_keys import StageKey, note, why
from serin.store.stage_results import one_at_a_time, receipt_file
from serin.store.store import Store
from serin.store.waits import Wait, claim, waiting
from serin.training.launch.job import result_folder

Value = TypeVar("Value")

_WORK = {"etl": "building the dataset", "train": "training the model", "export": "exporting the model"}
_first_shown: list[str] = []  # the devices that CUDA may have been initialised with in this process
_PURPOSE = {"etl": "dataset", "train": "training", "export": "export"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult(Generic[Value]):
    """What a stage gives. `ran`: False when an earlier result was found. `why`: why it ran, or what was found.
    `receipt`: what the work cost; None when nothing was done."""

    value: Value
    ran: bool
    why: str
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """One call of a stage.

    `name`: the pipeline's. `attempt`: names a fresh try, which is resumed by the same name; None: an earlier result is
    used. `run`: the orchestrator's run under which the reason is noted; None outside of an orchestrator. `priority`:
    that of its leases. `stop`: set from another thread to end the work. `waits`: what the call has waited for.
    """

    stage: str
    name: str
    attempt: str | None = None
    run: str | None = None
    priority: Priority = "normal"
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[Wait] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        stage: str,
        name: str,
        *,
        fresh: bool,
        attempt: str | None,
        run: str | None,
        priority: Priority,
        stop: threading.Event | None,
    ) -> Self:
        """A call that uses an earlier result unless it is `fresh`; a fresh try without a name gets a new one."""
        tried = (attempt or secrets.token_hex(4)) if fresh else None
        return cls(
            stage=stage, name=name, attempt=tried, run=run, priority=priority, stop=stop or threading.Event()
        )

    @property
    def home(self) -> Path:
        return environment.home()

    def key(self, parts: StageKey) -> str:
        """The name of the result: that of its parts, set apart for a fresh try."""
        return f"{parts.digest}-{self.attempt[:8]}" if self.attempt else parts.digest

    def log(self, line: str) -> None:
        logging.getLogger(f"serin.pipeline.{self.stage}").info("%s", line)

    def found(self, value: Value, reason: str) -> StageResult[Value]:
        """The result of a call that had nothing to do."""
        self.log(reason)
        self.note(ran=False, reason=reason, value=value)
        return StageResult(value=value, ran=False, why=reason)

    def begin(self, parts: StageKey, *, receipt: Path | None = None) -> str:
        """Logs and notes why the work is done; returns the reason. `receipt`: its file, unless it is the stage's.
        EnvironmentRefused when the work belongs to another image."""
        refuse_other_image()
        reason = why(self.home, self.name, parts, fresh=self.attempt is not None)
        self.log(f"{_WORK[self.stage]} ({reason})")
        file = receipt or receipt_file(self.home, self.stage, self.key(parts))
        self.note(ran=True, reason=reason, receipt=str(file.relative_to(self.home)))
        return reason

    @contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Holds the stage's lock for `key`; gives whether another call had to be waited for."""
        with ExitStack() as held:
            with waiting(self.waits, waits_before_work(self.stage)[0]):
                waited = held.enter_context(one_at_a_time(self.home, self.stage, key, stop=self.stop))
            yield waited

    @contextmanager
    def lease(self, needs: Needs, *, gives_way: bool = False, after: Lease | None = None) -> Iterator[Lease]:
        """Holds what the stage needs. `gives_way` and `after`: see leases.lease; only idle work gives way."""
        wanted = lease(
            needs.gpus,
            home=self.home,
            purpose=f"{_PURPOSE[self.stage]} of {self.name}",
            shared=needs.shared,
            memory_bytes=needs.memory_bytes,
            priority=self.priority,
            gives_way=gives_way and self.priority == "idle",
            after=after,
            stop=self.stop,
        )
        with ExitStack() as held:
            with waiting(self.waits, waits_before_work(self.stage)[1]):
                given = held.enter_context(wanted)
            yield given

    @contextmanager
    def work(self, needs: Needs, key: str) -> Iterator[Measurement]:
        """Holds what the stage needs, shows this process no other GPU, and measures. The receipt is written beside the
        stage's result, also when the work fails: it was paid for."""
        with self._shown(needs) as held, stoppable(self.stop, self.stage):
            measurement = None
            try:
                with measure(self.stage, held.devices) as measurement:
                    claim()  # what other work of this process has left
                    measurement.waits = self.waits
                    try:
                        yield measurement
                    finally:
                        self.waits.extend(claim())
            finally:
                if measurement is not None and measurement.receipt is not None:
                    measurement.receipt.write(receipt_file(self.home, self.stage, key))

    @contextmanager
    def _shown(self, needs: Needs) -> Iterator[Lease]:
        """A lease on GPUs that this process can be shown. CUDA looks at what is visible once, when it is initialised:
        after that, work in this process gets the same devices in the same order, whatever it is shown."""
        fixed = _first_shown[: needs.gpus]
        with ExitStack() as stack:
            if fixed:
                with environment.showing_devices(fixed):
                    held = stack.enter_context(self.lease(replace(needs, gpus=len(fixed))))
            else:
                held = stack.enter_context(self.lease(needs))
            stack.enter_context(environment.showing_devices(held.ids, needs.memory_bytes))
            if not _first_shown and environment.path("SERIN_INVENTORY") is None:
                _first_shown.extend(held.ids)
            yield held

    def note(self, *, ran: bool, reason: str, value: object = None, receipt: str | None = None) -> None:
        """Records for the orchestrator's run the outcome of the stage, and the model version it published."""
        if self.run is not None:
            version = (value.model, value.version) if isinstance(value, Bundle) else None
            note(
                self.home, self.run, self.stage, ran=ran, why=reason, version=version, receipt=receipt,
                environment=None if entered() is None else str(entered()),
            )  # fmt: skip


def waits_before_work(stage: str) -> tuple[str, str]:
    """The names of the waits for the lock and for the lease of a stage."""
    return f"another run that did the same {stage}", f"a free GPU for {stage}"


# Names of datasets and of trainings are digests of what decides them, so the same name is the same content everywhere.
def dataset_here(dataset: Dataset) -> Dataset:
    """The same dataset with a path of this host, and in use until this process ends. NotFound when it is gone."""
    store = Store.open()
    alone = environment.shared_store_url() is None
    if alone or not dataset.path or (Path(dataset.path) / "dataset.json").is_file():
        store.hold_dataset(dataset)
        return dataset
    found = store.dataset(dataset.edition)
    if found is None:
        raise NotFound(kind="dataset", name=dataset.edition, known=store.datasets())
    return found


def checkpoint_here(checkpoint: Checkpoint) -> Checkpoint | None:
    """The same weights with a path of this host, and in use until this process ends. None when they are gone."""
    path, home = Path(checkpoint.path), environment.home()
    hold_run_of(home, path)
    if path.is_dir():
        return checkpoint
    if environment.shared_store_url() is None:
        return None
    run = path.parent.name
    target = result_folder(run_folder(home, run))
    if not fetch_checkpoint(Store.open(), f"{run}/{target.name}", target):
        return None
    return replace(checkpoint, path=str(target))


def share_checkpoint(checkpoint: Checkpoint) -> None:
    """Copies trained weights to the store that other hosts use, where there is one."""
    if environment.shared_store_url() is not None:
        path = Path(checkpoint.path)
        publish_checkpoint(Store.open(), f"{path.parent.name}/{path.name}", path)
