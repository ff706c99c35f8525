"""What a home keeps: folders of runs, with their specs, trainings and receipts, and inputs that only this home has.

Inputs are tables made from data frames (Parquet files, named by their content) and graphs from a registry (folders).
All of it is always local.
"""

from __future__ import annotations

import re
from pathlib import Path

from serin.errors import NameInvalid
from serin.machine.durable import make_private, write_whole
from serin.machine.locks import hold_until_exit
from serin.store.published import touch

_MODEL = "model"
_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")


def run_folder(home: Path, run: str) -> Path:
    """The run's folder, created if need be, which is in use until this process ends."""
    if not _RUN.fullmatch(run):
        raise NameInvalid(kind="run", name=run, rule="small letters, digits and '-', at most 80 characters")
    folder = home / "runs" / run
    make_private(home)
    hold_until_exit(run_lock(home, run))
    folder.mkdir(parents=True, exist_ok=True)
    touch(folder)
    return folder


def hold_run_of(home: Path, path: Path) -> None:
    """The run that `path` is a part of is in use until this process ends."""
    folder = home / "runs"
    if path.is_relative_to(folder) and path != folder:
        run = path.relative_to(folder).parts[0]
        hold_until_exit(run_lock(home, run))
        touch(folder / run)


def name_model(folder: Path, model: str) -> None:
    """Records for which model a run is; several models may share one, the last of them is named."""
    write_whole(folder / _MODEL, f"{model}\n")


def model_of(folder: Path) -> str | None:
    try:
        return (folder / _MODEL).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def run_lock(home: Path, run: str) -> Path:
    return home / "locks" / "runs" / run


def runs(home: Path) -> list[str]:
    """The names of all runs, sorted. What was not removed to its end is not one."""
    return [path.name for path in sorted((home / "runs").glob("*/")) if _RUN.fullmatch(path.name)]


def hold_input(home: Path, path: Path) -> None:
    """The input is in use until this process ends. Its lock records when it was used last: a table itself keeps its
    time, by which datasets are found."""
    lock = input_lock(home, path)
    hold_until_exit(lock)
    touch(lock)


def input_lock(home: Path, path: Path) -> Path:
    return home / "locks" / path.relative_to(home)


def inputs(home: Path) -> list[Path]:
    """Tables made from data frames, then folders of graphs from a registry."""
    return [*sorted((home / "tables").glob("*.parquet")), *sorted((home / "imported").glob("*"))]
