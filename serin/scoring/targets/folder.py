"""A folder of Parquet files as the target of scheduled scoring: a run appears with its watermark in one rename."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.errors import ScoringRefused
from serin.scoring.targets.target import ScoredRun, check_complete, finished_run, run_folders


@dataclass(frozen=True, slots=True)
class FolderTarget:
    folder: Path

    @property
    def name(self) -> str:
        return str(self.folder)

    def read_runs(self) -> dict[int, ScoredRun]:
        numbers = run_folders(self.folder)
        found = {number: finished_run(self.folder, number) for number in numbers}
        runs = {number: run for number, run in found.items() if run is not None}
        check_complete(self, runs, max(numbers, default=0))
        return runs

    def commit(self, number: int, done: ScoredRun) -> None:
        """The rename that has finished the run was the commit."""


def open_folder(out: str) -> FolderTarget:
    """The folder of a target. ScoringRefused for what cannot take a run in one step."""
    if "://" in out:
        reason = "a run must appear in one step, which a folder of a disk can and an object store cannot"
        advice = f"use a Delta table there: --out '{{delta: {out}}}'"
        raise ScoringRefused(target=out, reason=f"{reason}; {advice}")
    folder = Path(out).absolute()
    if folder.is_file() or folder.suffix in (".parquet", ".csv", ".jsonl", ".db", ".sqlite"):
        reason = "it is a file; name a folder, which gets a folder for each run"
        raise ScoringRefused(target=out, reason=reason)
    if (folder / "_delta_log").exists():
        raise ScoringRefused(target=out, reason=f"it is a Delta table; write --out '{{delta: {out}}}'")
    return FolderTarget(folder)
