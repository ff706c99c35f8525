"""status.json: how a training ended, because torchrun turns every exit code into 1. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from serin.machine.durable import write_whole

# again: all processes must restart, with a changed setting that is stored in the run's folder (memory.py)
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
