"""Hosts that share records through a store, in one process: each has a home, and does a round when a test calls it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.formats.captures import METADATA
from serin.monitoring.capture.all_hosts import AllHosts, SharedRecords
from serin.monitoring.capture.merge import merge_parts
from serin.monitoring.capture.read import parts, read_part
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.served import FollowedRecords, lead
from serin.watcher.share_duty import ShareRound
from tests.kit.recorded_parts import write_part

NOON = 1772366400.0  # 2026-03-01T12:00 UTC
MODEL = "taxis"


def rows(*numbers: int, t: float = NOON, host: str = "") -> pa.Table:
    times = pa.array([round(t * 1e6) + number for number in numbers], pa.int64()).cast(METADATA["_t"])
    return pa.table(
        {
            "_id": [f"{host}{number}" for number in numbers],
            "_row": pa.array([0] * len(numbers), pa.int32()),
            "_t": times,
            "passenger_id": pa.array(numbers, pa.int64()),
        }
    )


class Led:
    """What a leading watcher has. `on_keep`: called when the store is to keep what it knows."""

    def __init__(self, state: Path) -> None:
        self.state, self.records = state, FollowedRecords()
        self.on_keep: Callable[[], object] = lambda: None

    def keep(self) -> None:
        self.on_keep()


@dataclass(slots=True)
class SharingHost:
    """A host with the home <folder>/<name>. `limits`: what the spec says about records."""

    folder: Path
    url: str
    name: str
    limits: CaptureSpec = field(default_factory=lambda: CaptureSpec(share=1.0, keep=100000 * 86_400))
    led: Led | None = None
    _round: ShareRound | None = None

    @property
    def home(self) -> Path:
        return self.folder / self.name

    @property
    def records(self) -> SharedRecords:
        return SharedRecords.of(self.store, self.home)

    @property
    def store(self) -> Store:
        return Store(self.url, cache=self.home / "cache")

    def record(self, *numbers: int, t: float = NOON, version: int = 1, release: str = "taxis-v1") -> None:
        table = rows(*numbers, t=t, host=self.name)
        names = pa.repeat(release, table.num_rows)
        write_part(self.home, MODEL, version, table.append_column("_release", names))

    def send(self, *numbers: int, **facts: Any) -> None:
        """Records and shares."""
        self.record(*numbers, **facts)
        self.share()

    def merge(self, now: float = NOON + 86_400) -> None:
        merge_parts(self.home, MODEL, now)

    def share(
        self, now: float = NOON + 60, *, wrap: Callable[[Any], Any] = lambda files: files, care: bool = False
    ) -> Mapping[str, Exception]:
        """Does a round. `wrap`: what the store is replaced by."""
        if self._round is None:
            self._round = ShareRound(
                self.home,
                self.store,
                self.settings,
                host=self.name,
                care_s=1e9,
            )
            self._round._cared = 0.0
        if care:
            self._round._cared = float("-inf")
        files = wrap(self.store.shared_files())
        self._round.records.files = files
        self._round.prepare()
        before, os.environ["SERIN_HOME"] = (
            os.environ["SERIN_HOME"],
            str(self.home),
        )  # whose labels are deleted
        try:
            return self._round.run(now)
        finally:
            os.environ["SERIN_HOME"] = before

    def lead(self, state: Path | None = None) -> Led:
        """Its watcher leads from now on. `state`: the home for what it knows; None: its own."""
        self.led = Led(state or self.home)
        lead(self.home, self.led)
        return self.led

    def lead_no_more(self) -> None:
        lead(self.home, None)

    def settings(self, release: Release) -> CaptureSpec:
        return self.limits

    def restart(self) -> None:
        self._round = None

    def all_hosts(self, model: str = MODEL) -> AllHosts:
        return AllHosts(self.home, self.records, self.name, model)

    def ids(self) -> list[str]:
        """What this host reads of all hosts, one id for each row."""
        return ids(self.all_hosts().tables())


def followed_ids(host: SharingHost) -> list[str]:
    """The ids of the rows that the duties of a host that leads follow."""
    assert host.led is not None
    with host.led.records.read(MODEL) as sources:
        assert sources is not None
        found = [
            read_part(part)
            for source in sources.values()
            for part in parts(source.home, MODEL, until=source.last)
        ]
        return ids(found)


def ids(tables: Iterable[pa.Table]) -> list[str]:
    return sorted(each for table in tables for each in table.column("_id").to_pylist())


class Failing:
    """Objects whose `fails`-th write does not answer: it was not done, or it was (`done`). Like a process that is
    killed, nothing works after it."""

    def __init__(self, files: Any, fails: int, *, done: bool, error: BaseException) -> None:
        self._files, self._left, self._done, self._error = files, fails, done, error

    @classmethod
    def at(cls, fails: int, *, done: bool, error: BaseException) -> Callable[[Any], Failing]:
        return lambda files: cls(files, fails, done=done, error=error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("create", "create_file", "put", "replace", "remove"):
            return found

        def write(*arguments: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left > 0:
                return found(*arguments, **more)
            if self._left == 0 and self._done:
                found(*arguments, **more)
            raise self._error

        return write
