"""The drift watch of one model: follows new parts of its records and keeps its state in a file.

The state, <home>/watch/drift/<model>.json, has the last part that was counted and all counts up to it. It is replaced
as a whole, so after a crash each part is counted exactly once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from serin.errors import FileBroken
from serin.formats.captures import Part, captures_folder, published, read_document
from serin.formats.drift import DriftStatistics
from serin.formats.shared_captures import records_source
from serin.machine.documents import UNFIT, read_json
from serin.machine.durable import write_whole
from serin.machine.typed_json import checked
from serin.monitoring.capture.read import part_tables, parts
from serin.monitoring.drift.release_watch import ReleaseWatch

FORMAT, VERSION = "serin.drift_watch", 1
_ROUND_S: Final = 2.0  # the other duties of the watcher wait for so long

_LOST = "restore it, or move it away: the drift of {model} is then watched from now on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A version to watch: its bundle's folder, its statistics for drift and its request columns."""

    version: int
    bundle: Path
    statistics: DriftStatistics
    inputs: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelWatch:
    """`last`: the sequence of the last part that was counted. `live`: the version whose alarms are reported. `told`:
    the keys of the alerts that were fired. `records`: the home with the records; None: `home`. `source`: identifies
    them."""

    home: Path
    model: str
    records: Path | None = None
    source: int = 0
    last: str | None = None
    live: int | None = None
    told: tuple[str, ...] = ()
    releases: dict[int, ReleaseWatch] = field(default_factory=dict)
    bundles: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def load(cls, home: Path, model: str, watched: Callable[[int, Path], Watched | None]) -> ModelWatch:
        """The watch as it was saved. `watched`: finds a version that it has counted; None when it is gone."""
        document = read_state(home, model)
        made = cls(home=home, model=model)
        if document is None:
            return made
        try:
            made.last, made.live, made.told = document["last"], document["live"], tuple(document["told"])
            made.source = document["source"]
            for name, entry in document["releases"].items():
                found = watched(int(name), Path(entry["bundle"]))
                if found is not None:
                    made.bundles[found.version] = found.bundle
                    made.releases[found.version] = ReleaseWatch.from_json(
                        found.statistics, found.inputs, entry
                    )
        except UNFIT as error:
            raise state_broken(home, model, error) from error
        return made

    def watch(self, wanted: Mapping[int, Watched], live: int | None) -> bool:
        """Starts the watch of new versions and ends that of others. Returns whether something changed."""
        before = (set(self.releases), self.live)
        for version in set(self.releases) - set(wanted):
            del self.releases[version], self.bundles[version]
        for version, found in wanted.items():
            if version not in self.releases:
                self.releases[version] = ReleaseWatch.start(found.statistics, found.inputs)
                self.bundles[version] = found.bundle
        self.live = live
        return before != (set(self.releases), live)

    def use(self, records: Path) -> None:
        """Follows the records in another home. What it has is not counted if others were counted before: it may be the
        same rows."""
        source = records_source(records, self.model)
        if source != self.source and self.last is not None:
            newest = published(captures_folder(records, self.model), read_document(records, self.model))
            self.last = f"{newest:012d}"
        self.records, self.source = records, source

    def follow(self, *, clock: Callable[[], float] = time.monotonic) -> int:
        """Counts new parts, for about two seconds at most; returns how many. The rest is counted the next time."""
        began, counted = clock(), 0
        for part in parts(self.records or self.home, self.model, after=self.last):
            if not self._count(part):
                break  # merged since it was listed: the next look finds its rows elsewhere
            self.last = part.sequence
            counted += 1
            if clock() - began > _ROUND_S:
                break
        return counted

    def _count(self, part: Part) -> bool:
        release = self.releases.get(part.version)
        if release is None:
            return True
        tables = part_tables(part, release.columns)
        if tables is None:
            return False
        for table in tables:
            release.add(table)
        return True

    def save(self) -> None:
        releases = {
            str(version): {"bundle": str(self.bundles[version]), **release.to_json()}
            for version, release in self.releases.items()
        }
        document = {
            "format": FORMAT,
            "version": VERSION,
            "last": self.last,
            "source": self.source,
            "live": self.live,
            "told": self.told,
            "releases": releases,
        }
        path = state_file(self.home, self.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document))


def state_file(home: Path, model: str) -> Path:
    return home / "watch" / "drift" / f"{model}.json"


def read_state(home: Path, model: str) -> dict[str, Any] | None:
    """The content of the state file; None when there is none."""
    path, advice = state_file(home, model), _LOST.format(model=model)
    return read_json(path, lambda document: checked(document, FORMAT, VERSION), advice=advice)


def state_broken(home: Path, model: str, error: Exception) -> FileBroken:
    problem = f"{type(error).__name__}: {error}"
    return FileBroken(path=state_file(home, model), problem=problem, advice=_LOST.format(model=model))
