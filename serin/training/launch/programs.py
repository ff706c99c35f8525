"""Lists the processes of a training, one after the other, by the kind of model. Does not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serin.errors import TrainingRefused
from serin.training.launch.job import TrainingJob
from serin.training.launch.machines import Machines

Command = list[str]


def programs(job: TrainingJob, folder: Path, machines: Machines) -> list[Command]:
    """Returns the commands. Each starts when the one before succeeded. All die with this process."""
    place, parent = str(folder), str(os.getpid())
    # A single process needs no torchrun, which would import torch a second time.
    alone = job.processes == machines.count == 1
    torchrun = torchrun_program(folder, job.processes, machines.torchrun_options(job.digest))
    take_over = _module("foreign.take_over", place, parent)
    match job.model.kind:
        case "xgboost":
            if job.processes > 1 and not job.gpu:
                reason = "XGBoost uses all cores in one process; remove training.processes, or set it to 1"
                raise TrainingRefused(folder=folder, reason=reason)
            return [_module("programs.trees", place, parent)]
        case "auto":
            return [_module("programs.auto", place, parent)]
        case "script":
            assert job.model.script is not None
            if not Path(job.model.script).is_file():
                reason = f"model.script: no file {job.model.script}; the path is relative to the spec's file"
                raise TrainingRefused(folder=folder, reason=reason)
            return [
                _module("foreign.script_rank", parent, job.model.script) if alone else torchrun,
                take_over,
            ]
        case "onnx":
            return [take_over]
        case _:
            return [_module("programs.worker", place, parent) if alone else torchrun]


def torchrun_program(folder: Path, ranks: int, options: list[str]) -> Command:
    """Returns the command for the ranks of this machine; `options`: torchrun's, about the other machines."""
    return _module("programs.agent", str(folder), str(ranks), str(os.getpid()), *options)


def pruning_program(folder: Path) -> Command:
    return _module("programs.pruning", str(folder), str(os.getpid()))


def _module(name: str, *arguments: str) -> Command:
    return [sys.executable, "-m", f"serin.training.{name}", *arguments]
