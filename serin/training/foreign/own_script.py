"""For training scripts: reads the environment that `model: {script: train.py}` gives them. Does not import torch.

    from serin.training.foreign.own_script import this_run

    run = this_run()
    train = run.split("train")  # num float32[n, k], cat int32[n, m], target float32[n]

Using it is optional: serin/training/launch/script.py lists the variables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import SpecError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import Rows, read_split
from serin.machine import environment
from serin.training.launch.progress import tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """The run of a script. `resume`: an earlier attempt left files in `checkpoints`. `output`: the folder for the
    model."""

    folder: Path
    dataset: Path | None
    checkpoints: Path
    resume: bool
    output: Path
    epochs: int
    seed: int
    options: dict[str, Any]

    def description(self) -> DatasetDescription:
        """Returns the dataset's columns, classes and rows."""
        if self.dataset is None:
            raise SpecError(
                where="the spec", problems=[("data", "is missing, so this script has no dataset")]
            )
        return read_dataset(self.dataset)

    def split(self, name: str) -> Rows:
        """Returns the rows of train, valid or test, memory-mapped."""
        self.description()
        assert self.dataset is not None
        return read_split(self.dataset, name).whole()

    def say(self, text: str) -> None:
        """Reports a line to the people who follow the training."""
        tell(self.folder, "note", text=text)

    def report(self, epoch: int, metrics: dict[str, float]) -> None:
        """Reports the metrics after an epoch (from 1)."""
        tell(self.folder, "epoch", epoch=epoch, epochs=self.epochs, metrics=metrics, best=False)

    def leave_metrics(self, metrics: dict[str, float]) -> None:
        """Reports metrics that only the script can measure, for a model with custom inputs."""
        (self.output / "metrics.json").write_text(json.dumps(metrics) + "\n")


def this_run() -> ScriptRun:
    """Returns the run that this process belongs to; raises SpecError when it was started by hand."""
    given = environment.script_variables()
    if given is None:
        problem = "SERIN_OUTPUT is not set; start the script with `serin train SPEC` and model: {script: ...}"
        raise SpecError(where="this script", problems=[("", problem)])
    return ScriptRun(
        folder=Path(given["SERIN_RUN"]),
        dataset=Path(given["SERIN_DATASET"]) if given.get("SERIN_DATASET") else None,
        checkpoints=Path(given["SERIN_CHECKPOINTS"]),
        resume=given["SERIN_RESUME"] == "1",
        output=Path(given["SERIN_OUTPUT"]),
        epochs=int(given["SERIN_EPOCHS"]),
        seed=int(given["SERIN_SEED"]),
        options=json.loads(given["SERIN_OPTIONS"]),
    )
