"""The files that backends left in the spool: which are complete, in which order, and what dead writers left."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serin.errors import NameInvalid
from serin.formats.serving.spool import COMPLETE, OPEN
from serin.machine.locks import try_lock
from serin.store.artifacts import Release

_QUIET_S = 30.0  # a file is open for milliseconds
_EMPTY_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolEntry:
    """A complete file. `writer`: release and writer, as the folders are called. `modified`: seconds since 1970, never
    less than that of an earlier file of the same writer."""

    path: Path
    release: Release
    writer: str
    number: int
    bytes: int
    modified: float


def complete_files(home: Path) -> list[SpoolEntry]:
    """All complete files, oldest first. Those of one writer are in the order of their numbers, whatever the clock
    did."""
    found: list[SpoolEntry] = []
    for release, folder in writer_folders(home):
        newest = 0.0
        for number, path in _numbered(folder, COMPLETE):
            with suppress(FileNotFoundError):
                status = path.stat()
                newest = max(newest, status.st_mtime)
                found.append(
                    SpoolEntry(
                        path=path,
                        release=release,
                        writer=f"{release.name}/{folder.name}",
                        number=number,
                        bytes=status.st_size,
                        modified=newest,
                    )
                )
    found.sort(key=lambda entry: (entry.modified, entry.writer, entry.number))
    return found


def writer_folders(home: Path) -> Iterator[tuple[Release, Path]]:
    for folder in _folders(home / "spool"):
        with suppress(NameInvalid):
            release = Release.parse(folder.name)
            for writer in _folders(folder):
                yield release, writer


def clean_up(home: Path, now: float) -> None:
    """Completes the files that were open when their writer died: it left them alone for long and holds no lock. Removes
    folders that have been empty for long; a writer that needs its folder makes it again."""
    for _, folder in writer_folders(home):
        for _, path in _numbered(folder, OPEN):
            _take_over(path, now)
        with suppress(OSError):
            if now - folder.stat().st_mtime > _EMPTY_S:
                folder.rmdir()


def waits(home: Path, model: str, before: float = math.inf) -> bool:
    """Whether the spool has requests of a model that were written before this time."""
    for release, folder in writer_folders(home):
        for _, path in (*_numbered(folder, COMPLETE), *_numbered(folder, OPEN)):
            with suppress(FileNotFoundError):
                if release.model == model and path.stat().st_mtime < before:
                    return True
    return False


def _take_over(path: Path, now: float) -> None:
    with suppress(FileNotFoundError):
        if abs(now - path.stat().st_mtime) < _QUIET_S:
            return
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(file):
                path.rename(path.with_suffix(COMPLETE))
        finally:
            os.close(file)


def _numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            stem = entry.name.removesuffix(suffix)
            if entry.name.endswith(suffix) and stem.isdigit():
                found.append((int(stem), Path(entry.path)))
    return sorted(found)


def _folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []
