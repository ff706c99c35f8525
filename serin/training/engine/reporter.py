"""Reports the progress of a run: the first rank writes progress.jsonl, the others write nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from serin.training.launch.job import ResolvedSettings
from serin.training.launch.progress import tell
from serin.training.parallel.ranks import Ranks
from serin.training.results.checkpoint import EpochRecord

_TELL_EVERY_S = 1.0


class Reporter:
    def __init__(self, folder: Path, world: Ranks, *, epochs: int) -> None:
        self._folder, self._world, self._epochs = folder, world, epochs
        self._told_at = time.perf_counter()

    def note(self, text: str) -> None:
        self._tell("note", text=text)

    def started(self, step: int, rows: int, choices: ResolvedSettings) -> None:
        device = self._world.device
        self._tell(
            "started",
            step=step,
            ranks=self._world.size,
            pid=os.getpid(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            rows=rows,
            batch_rows=choices.batch_rows,
            precision=choices.precision,
            precision_reason=choices.precision_reason,
            strategy=choices.strategy,
            execution=choices.execution,
            execution_reason=choices.execution_reason,
        )

    def steps(
        self, step: int, of: int, losses: list[float], seconds: float, choices: ResolvedSettings
    ) -> None:
        """Reports the steps since the last synchronisation, at intervals."""
        now = time.perf_counter()
        if now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        self._tell(
            "step",
            step=step,
            steps=of,
            epoch=(step - 1) // choices.steps_per_epoch + 1,
            epochs=self._epochs,
            loss=sum(losses) / len(losses),
            rows_per_s=len(losses) * choices.batch_rows / max(seconds, 1e-9),
            left_s=round((of - step) * seconds / len(losses), 1),
        )

    def epoch(self, record: EpochRecord, *, best: bool) -> None:
        shown = {"loss": record.loss, **{f"valid_{name}": value for name, value in record.metrics.items()}}
        self._tell(
            "epoch", step=record.step, epoch=record.epoch, epochs=self._epochs, metrics=shown, best=best
        )

    def checkpoint(self, step: int) -> None:
        self._tell("checkpoint", step=step)

    def _tell(self, event: str, **facts: object) -> None:
        if self._world.first:
            tell(self._folder, event, **facts)
