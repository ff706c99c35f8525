"""The variables of a Slurm pool, and the options of sbatch and the batch script that they become."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from prefect.workers.base import BaseJobConfiguration
from pydantic import Field, model_validator

_PROGRAM = "serin.prefect.slurm_job"
_TRAIN = "train"  # the flow that several nodes work on together
_OF_THE_WORKER = (
    "SLURM_",
    "SERIN_STACK",
    "SERIN_PROCESS",
)  # variables that describe the worker, not its jobs
_KEPT = ("SLURM_CONF",)
_LEAST_GB = 1.0  # of a process that has imported everything
_GROWS = 6  # what a table takes in memory, in times of its size on disk


class SlurmConfiguration(BaseJobConfiguration):
    """What a run asks of Slurm. The defaults of a pool are in its template; a deployment or a run may set others."""

    partition: str | None = Field(
        default=None, description="Slurm's partition. Empty: the cluster's default."
    )
    account: str | None = Field(default=None, description="The account that pays.")
    qos: str | None = Field(default=None, description="Quality of service.")
    nodes: int = Field(default=1, ge=1, description="Nodes that train together. Other stages take one.")
    gpus: int = Field(default=0, ge=0, description="GPUs on each node.")
    gpu_type: str | None = Field(default=None, description="The type of GPU as in gres.conf, such as h200.")
    cores: int = Field(default=2, ge=1, description="Cores on each node.")
    memory_gb: float | None = Field(
        default=None, gt=0, description="Memory on each node. Empty: the default of the cluster."
    )
    most_memory_gb: float | None = Field(
        default=None, gt=0, description="Memory for an ETL of much data, at most. Empty: memory_gb for all."
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        description="training.processes of the spec, set by the pipeline: as many GPUs where the pool has GPUs, else "
        "at least as many cores.",
    )
    data_gb: float | None = Field(
        default=None,
        ge=0,
        description="The size of the tables' files, set by the pipeline: an ETL gets memory for it.",
    )
    time_minutes: int = Field(
        default=60, ge=1, description="Time limit of one job. A training continues in the next."
    )
    stop_before_s: int = Field(
        default=120, ge=1, description="Seconds before the time limit at which a training is asked to save."
    )
    options: list[str] = Field(
        default_factory=list, description="More options of sbatch, such as --constraint=ib."
    )
    setup: list[str] = Field(
        default_factory=list, description="Shell lines before the run, such as module load cuda."
    )
    python: str | None = Field(default=None, description="Python on the nodes. Empty: the worker's.")

    @model_validator(mode="after")
    def _has_time_to_work(self) -> Self:
        if self.stop_before_s >= 60 * self.time_minutes:
            raise ValueError(
                f"stop_before_s={self.stop_before_s} leaves no time to work within time_minutes={self.time_minutes}; "
                f"use less than {60 * self.time_minutes}"
            )
        return self

    def sbatch_options(self, *, run: str, flow: str, home: Path) -> list[str]:
        """Returns the options of sbatch for a run. No option holds a secret: arguments are visible to all users.

        Jobs of one name never run at the same time (singleton), so a run that was submitted twice is not run twice.
        """
        log = str(home / "logs" / "slurm").replace("%", "%%")
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        gpus, cores, memory_gb = self.shares()
        wanted = {
            "job-name": run,
            "comment": f"serin {flow}",
            "dependency": "singleton",
            "export": "ALL",
            "chdir": str(home),
            "output": f"{log}/%x-%j.log",
            "open-mode": "append",
            "signal": f"B:USR1@{self.stop_before_s}",
            "nodes": str(self.nodes if flow == _TRAIN else 1),
            "ntasks-per-node": "1",
            "cpus-per-task": str(cores),
            "time": str(self.time_minutes),
            "mem": f"{int(memory_gb * 1000)}M" if memory_gb else None,
            "gres": f"gpu:{kind}{gpus}" if gpus else None,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
        }
        given = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
        return ["--parsable", "--requeue", *given, *self.options]

    def shares(self) -> tuple[int, int, float | None]:
        """Returns the GPUs, cores and gigabytes on each node: the pool's, changed by what the stage needs."""
        gpus = self.processes if self.processes and self.gpus else self.gpus
        cores = max(self.cores, self.processes or 1)
        memory = self.memory_gb
        if memory is not None and self.most_memory_gb is not None and self.data_gb is not None:
            memory = max(memory, min(self.most_memory_gb, _LEAST_GB + _GROWS * self.data_gb))
        return gpus, cores, memory

    def script(self) -> str:
        """Returns the batch script. The program that it becomes gets Slurm's signals."""
        lines = [
            "#!/bin/bash",
            *self.setup,
            f"exec {shlex.quote(self.python or sys.executable)} -m {_PROGRAM}",
        ]
        return "\n".join(lines) + "\n"

    def job_environment(self, own: Mapping[str, str], *, home: Path) -> dict[str, str]:
        """Returns the environment of the job: the worker's (`own`) and what the run needs.

        sbatch hands its own environment to the job, so that credentials are in no argument and in no file of ours.
        """
        kept = {
            name: value for name, value in own.items() if name in _KEPT or not name.startswith(_OF_THE_WORKER)
        }
        given: dict[str, Any] = {**kept, **self.env, "SERIN_HOME": str(home), "SERIN_SCHEDULER": "slurm"}
        return {name: str(value) for name, value in given.items() if value is not None}
