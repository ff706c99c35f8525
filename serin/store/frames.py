"""Tables that were made from data frames: Parquet files under SERIN_HOME/tables, named by their content."""

from __future__ import annotations

from pathlib import Path

from serin.machine.in_use import hold_until_exit
from serin.machine.private import make_private
from serin.store.published import touch


def frames_folder(home: Path) -> Path:
    """The folder of these tables, created where it is missing."""
    return make_private(make_private(home) / "tables")


def hold_frame(home: Path, path: Path) -> None:
    """The table is in use until this process ends. Its lock records when it was used last: the file itself keeps its
    time, by which datasets are found."""
    lock = frame_lock(home, path)
    hold_until_exit(lock)
    touch(lock)


def frame_lock(home: Path, path: Path) -> Path:
    return home / "locks" / "tables" / path.name


def frames(home: Path) -> list[Path]:
    folder = home / "tables"
    return sorted(folder.glob("*.parquet")) if folder.is_dir() else []
