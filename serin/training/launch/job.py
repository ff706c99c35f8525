"""The files in a training's folder that the launcher and its processes share. Does not import torch.

training.json  the input of a worker: written by the launcher, validated again by every rank
choices.json   the values of `auto` settings
status.json    how it ended, because torchrun turns every exit code into 1
result/        the trained model, with a pruned network in result/pruned/ if requested
pruned/        the run in which the pruned network is trained further
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from serin.errors import TrainingRefused
from serin.machine.durable import sync, write_whole
from serin.machine.locks import locked
from serin.spec.model import ModelSpec
from serin.spec.section import Section
from serin.spec.training import Execution, Strategy, TrainingSpec

# These change how a run proceeds, not its result: a run may be resumed with other values of them.
_FREE = frozenset(
    {"processes", "processes_per_gpu", "strategy", "gradient_checkpointing", "checkpoint_every_steps"}
)


class TrainingJob(Section):
    format: Literal["serin.training"] = "serin.training"
    version: Literal[2] = 2
    model: ModelSpec
    training: TrainingSpec
    dataset: str  # folder
    dataset_digest: str
    processes: int  # ranks on this machine
    gpu: bool  # one GPU per rank, or per `training.processes_per_gpu` ranks; else all ranks on the CPU
    test: bool = True  # score the test rows at the end; off for trials of a search

    @property
    def gpus(self) -> int:
        """The number of GPUs of this machine that its ranks use."""
        return gpus_for(self.processes, self.training) if self.gpu else 0

    def differences(self, other: TrainingJob) -> list[str]:
        """Returns the settings by which `other` would end with other weights, as 'training.seed: 0 -> 1'."""
        mine, theirs = self._identity(), other._identity()
        keys = dict.fromkeys((*mine, *theirs))
        return [
            f"{key}: {mine.get(key)} -> {theirs.get(key)}" for key in keys if mine.get(key) != theirs.get(key)
        ]

    @property
    def digest(self) -> str:
        """Returns a digest that is the same for trainings that end with the same weights."""
        return hashlib.sha256(json.dumps(self._identity(), default=str).encode()).hexdigest()[:16]

    def _identity(self) -> dict[str, Any]:
        training = self.training.model_dump(exclude=set(_FREE))
        trees = self.model.kind == "xgboost" and self.processes > 1  # bins depend on how rows are shared out
        return {
            **({"processes": self.processes} if trees else {}),
            **{f"model.{key}": value for key, value in self.model.without_folders().model_dump().items()},
            **{f"training.{key}": value for key, value in training.items()},
            "dataset": self.dataset_digest,
        }


def gpus_for(processes: int, training: TrainingSpec) -> int:
    """The number of GPUs for so many processes."""
    return -(-processes // training.processes_per_gpu)


class ResolvedSettings(Section):
    """choices.json: the values of 'auto' settings, resolved when the run began and kept when it is resumed."""

    format: Literal["serin.training.choices"] = "serin.training.choices"
    version: Literal[2] = 2
    batch_rows: int  # per step, all ranks together
    batch_reason: str = ""
    steps_per_epoch: int
    learning_rate: float | None = None  # its peak; None: from the spec
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: not decided yet
    precision_reason: str = ""
    threads: int  # per rank; needed for bit-identical CPU runs
    ranks: int = 1
    strategy: Strategy = "ddp"
    strategy_reason: str = ""
    by_row: bool = False  # category tables are updated row by row
    parts: int = 1  # parts in which a rank's rows go through the network
    execution: Literal["auto", Execution] = "auto"  # auto: not decided yet
    execution_reason: str = ""
    device: Literal["cpu", "cuda"]
    torch: str


def read_job(folder: Path) -> TrainingJob:
    return TrainingJob.model_validate_json(training_file(folder).read_bytes())


def training_file(folder: Path) -> Path:
    return folder / "training.json"


def choices_file(folder: Path) -> Path:
    return folder / "choices.json"


def result_folder(folder: Path) -> Path:
    return folder / "result"


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a run, the newest last."""
    complete = (folder / "checkpoints").glob("step-*/COMPLETE")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in complete)


@contextmanager
def only_one(path: Path, *, wait_s: float) -> Iterator[None]:
    """Holds the lock file for the block; raises TrainingRefused when another process still holds it after `wait_s`."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_s=wait_s))
        except TimeoutError:
            reason = "another process is training there; wait for it or use another folder"
            raise TrainingRefused(folder=path.parent, reason=reason) from None
        yield


# again: all processes must restart, with a changed setting that is stored in the run's folder (StartAgain)
State = Literal["done", "preempted", "diverged", "refused", "failed", "again"]


class Status(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["serin.training.launch.status"] = "serin.training.launch.status"
    version: Literal[1] = 1
    state: State
    step: int = 0
    loss: str = ""  # when diverged: nan, inf
    rank: int = 0  # when failed: the first rank that did ...
    exit_code: int = 0  # ... negative for a signal
    reason: str = ""  # when refused, failed or again
    rows: int = 0  # trained on by this attempt
    work_s: float = 0.0  # in the steps, without start, evaluation and checkpoints
    data_wait_share: float = 0.0
    peak_bytes: tuple[int, ...] = ()  # per rank, when on GPUs
    flops: float = 0.0  # of this attempt, all ranks together; 0: not counted
    moved_bytes: float = 0.0
    peak_flops_per_s: float = 0.0  # of all ranks' devices together, measured
    peak_bytes_per_s: float = 0.0


def status_file(folder: Path) -> Path:
    return folder / "status.json"


def write_status(folder: Path, status: Status) -> None:
    write_whole(status_file(folder), status.model_dump_json() + "\n")


def read_status(folder: Path) -> Status | None:
    """Reads the status; None while the training has not ended, or when it was killed before it could record one."""
    try:
        return Status.model_validate(json.loads(status_file(folder).read_text()))
    except FileNotFoundError:
        return None


PRUNED = "pruned"


def pruned_run(folder: Path) -> Path:
    """Returns the run folder in which the pruned network is trained further."""
    return folder / PRUNED


def start_folder(folder: Path) -> Path:
    """Returns the folder of weights with which a run begins instead of random ones."""
    return start_of(pruned_run(folder))


def start_of(run: Path) -> Path:
    return run / "start"


def is_published(folder: Path) -> bool:
    return (result_folder(folder) / PRUNED).exists()


def publish_pruned(folder: Path) -> None:
    """Publishes `result/pruned/`, the result of the second run, completely or not at all."""
    with whole_folder(result_folder(folder) / PRUNED) as scratch:
        shutil.copytree(result_folder(pruned_run(folder)), scratch, dirs_exist_ok=True)


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `final` at the end of the block, completely or not at all."""
    scratch = final.with_name(f".{final.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    yield scratch
    for file in filter(Path.is_file, scratch.rglob("*")):
        sync(file)
    scratch.rename(final)
    sync(final.parent)
