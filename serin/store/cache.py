"""Copies on this host of what an object store has published, for any number of processes.

    <place>/<name>          the files, each renamed into place once its digest is right
    records/<place>.json    the attempt they belong to, and the stat of each file when its digest was compared
    locks/<place>           held exclusively while files are fetched
    in-use/<place>          held by processes that use the copy: it is not removed under them
    work/                   folders that are being filled

A copy is used as it is while its files look as they did when they were compared. A file that does not is read again,
and fetched again when its digest is wrong. The copies that were used longest ago are removed when all together are too
large.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken
from serin.machine.durable import sync, write_whole
from serin.machine.locks import hold_until_exit, holding, locked, unused
from serin.store.file_list import Published, is_as_listed

logger = logging.getLogger(__name__)

Fetch = Callable[[Mapping[str, Path]], None]

_GRACE_S = 3600.0  # a copy that was used since then is not removed: somebody may be reading it
_TRIES = 3


class Cache:
    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = self._root = root
        self._limit = limit_bytes

    def workspace_parent(self) -> Path:
        return self._root / "work"

    def get(
        self,
        place: str,
        published: Published,
        fetch: Fetch,
        *,
        hold: bool = False,
        compared: bool = False,
        shrink: bool = True,
    ) -> Path:
        """The folder with the files of `published`; `fetch` gets those that are missing or damaged here.

        `hold`: it is in use until this process ends. `compared`: what `fetch` gets has the right digests. `shrink`:
        otherwise the caller makes room, after many calls.
        """
        folder = self._root / place
        if hold:
            hold_until_exit(self._in_use(place))
        with holding(self._in_use(place)):
            self._touch(place)
            if self._is_whole(place, published):
                return folder
            with self._filling(place):
                if not self._is_whole(place, published):
                    self._fill(place, published, fetch, compared=compared)
        if shrink:
            self.shrink()
        return folder

    def adopt(self, place: str, published: Published, folder: Path, *, hold: bool = False) -> Path:
        """Takes the files that were just published as the copy."""

        def move(files: Mapping[str, Path]) -> None:
            for name, target in files.items():
                shutil.move(folder / name, target)  # SERIN_SCRATCH may be another file system

        return self.get(place, published, move, hold=hold, compared=True)

    def known(self, place: str, *, hold: bool = False) -> Path | None:
        """The copy without a look at the store, if it is whole: for a store that does not answer."""
        if hold:
            hold_until_exit(self._in_use(place))
        with holding(self._in_use(place)):
            self._touch(place)
            record = self._record(place)
            return self._root / place if record and self._looks_right(place, record["files"]) else None

    def forget(self, place: str) -> bool:
        """Removes a copy, with what a killed process had fetched of it. False: it is in use."""
        with unused(self._in_use(place)) as free:
            if free:
                self._remove(place)
                self._in_use(place).unlink(missing_ok=True)
        return free

    # how

    def _fill(self, place: str, published: Published, fetch: Fetch, *, compared: bool) -> None:
        folder = self._root / place
        folder.mkdir(parents=True, exist_ok=True)
        self._record_file(place).unlink(missing_ok=True)
        for path in [path for path in folder.rglob("*") if not path.is_dir()]:
            if path.relative_to(folder).as_posix() not in published.files:
                path.unlink()
        missing = [name for name, file in published.files.items() if not is_as_listed(folder / name, file)]
        for _ in range(_TRIES):
            missing = self._fetch_into(place, missing, published, fetch, compared=compared)
        if missing:
            raise BundleBroken(path=place, reason=f"{missing[0]} in the store does not match its digest")
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            sync(path)
        stats = {name: _stat(folder / name) for name in published.files}
        record = {"attempt": published.attempt, "bytes": published.size, "files": stats}
        self._record_file(place).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._record_file(place), json.dumps(record))

    def _fetch_into(
        self, place: str, names: list[str], published: Published, fetch: Fetch, *, compared: bool
    ) -> list[str]:
        """Returns the names of those that arrived damaged."""
        folder, damaged = self._root / place, list[str]()
        if not names:
            return damaged
        with self._scratch(place) as scratch:
            files = {name: scratch / str(number) for number, name in enumerate(names)}
            fetch(files)
            for name, path in files.items():
                if not compared and not is_as_listed(path, published.files[name]):
                    logger.warning(f"{name} arrived damaged from the store; fetching it again")
                    damaged.append(name)
                    continue
                sync(path)
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        return damaged

    @contextmanager
    def _scratch(self, place: str) -> Iterator[Path]:
        """An empty folder to fetch files into. A place has one: a process that was killed leaves it to the next."""
        folder = self._scratch_folder(place)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _scratch_folder(self, place: str) -> Path:
        return self.workspace_parent() / hashlib.sha256(place.encode()).hexdigest()[:16]

    @contextmanager
    def _filling(self, place: str) -> Iterator[None]:
        path = self._root / "locks" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            yield

    def _is_whole(self, place: str, published: Published) -> bool:
        record = self._record(place)
        if record is None or record["attempt"] != published.attempt:
            return False
        return set(record["files"]) == set(published.files) and self._looks_right(place, record["files"])

    def _looks_right(self, place: str, stats: Mapping[str, object]) -> bool:
        try:
            return all(_stat(self._root / place / name) == seen for name, seen in stats.items())
        except OSError:
            return False

    def _record(self, place: str) -> dict[str, Any] | None:
        try:
            record = json.loads(self._record_file(place).read_bytes())
            return record if {"attempt", "bytes", "files"} <= set(record) else None
        except (OSError, ValueError, TypeError):
            return None

    def _record_file(self, place: str) -> Path:
        return self._root / "records" / f"{place}.json"

    def _in_use(self, place: str) -> Path:
        return self._root / "in-use" / place

    def _touch(self, place: str) -> None:
        with suppress(OSError):
            os.utime(self._record_file(place))

    def shrink(self) -> None:
        """Removes the copies that were used longest ago until the rest fits."""
        records = self._root / "records"
        found = []
        for path in records.rglob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append((path.stat().st_mtime, int(json.loads(path.read_bytes())["bytes"]), path))
        if not found:
            return
        total = sum(size for _, size, _ in found)
        limit = shutil.disk_usage(self._root).total // 5 if self._limit is None else self._limit
        for used, size, path in sorted(found):
            if total <= limit or time.time() - used < _GRACE_S:
                return
            place = path.relative_to(records).as_posix().removesuffix(".json")
            with unused(self._in_use(place)) as free:
                if free and path.exists() and path.stat().st_mtime == used:
                    self._remove(place)
                    self._in_use(place).unlink(missing_ok=True)
                    total -= size

    def _remove(self, place: str) -> None:
        self._record_file(place).unlink(missing_ok=True)
        for folder in (self._root / place, self._scratch_folder(place)):
            shutil.rmtree(folder, ignore_errors=True)


def _stat(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
