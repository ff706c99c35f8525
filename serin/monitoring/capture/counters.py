"""How many requests were recorded and dropped, for each release. Kept in counters.json, which also says how far each of
the gateway's rings is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from serin.formats.captures import captures_folder, hour_folders, parts_of_hour, read_document
from serin.machine.typed_json import json2value, value2json

_MOST_WRITERS = 500


@dataclass(slots=True)
class ReleaseCounts:
    """`requests` and `rows`: recorded. `dropped`: requests that were drawn, answered and lost because a ring or the
    disk was full, they were too large for the ring, the gateway was killed, or they could not be decoded. `damaged`:
    those of them that could not be decoded. `share`: of the requests, the share that is drawn."""

    requests: int = 0
    rows: int = 0
    dropped: int = 0
    damaged: int = 0
    share: float = 0.0


@dataclass(slots=True)
class WriterCounts:
    """What is known of a ring. `position`: up to which it is recorded. `requests`: how many entries were read from it.
    `lost`: how many requests were dropped before they were entries. `release`: that of the last entry."""

    position: int = 0
    requests: int = 0
    lost: int = 0
    release: str = ""


@dataclass(frozen=True, slots=True)
class Counters:
    """The content of counters.json while a commit is prepared."""

    releases: dict[str, ReleaseCounts]
    writers: dict[str, WriterCounts]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Counters:
        return json2value(
            cls, {"releases": document.get("releases", {}), "writers": document.get("writers", {})}
        )

    @property
    def requests(self) -> int:
        return sum(release.requests for release in self.releases.values())

    @property
    def dropped(self) -> int:
        return sum(release.dropped for release in self.releases.values())

    def limit_writers(self) -> None:
        """Leaves out the writers that started longest ago when there are very many. Names begin with the start time."""
        for name in sorted(self.writers)[:-_MOST_WRITERS]:
            del self.writers[name]

    def release(self, name: str) -> ReleaseCounts:
        return self.releases.setdefault(name, ReleaseCounts())

    def writer(self, name: str) -> WriterCounts:
        return self.writers.setdefault(name, WriterCounts())

    def into(self, document: Mapping[str, Any]) -> dict[str, Any]:
        return {**document, **value2json(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCaptures:
    """The records of a version that are kept now."""

    version: int
    hours: int
    rows: int
    bytes: int
    first_hour: str
    last_hour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturesView:
    """A model's records: totals since the beginning, and what is kept now. `host`: None where they are not shared.
    `lost_rows`: recorded rows that were deleted on their host before the shared store had them."""

    model: str
    requests: int
    rows: int
    dropped: int
    damaged: int
    releases: Mapping[str, ReleaseCounts]
    versions: tuple[VersionCaptures, ...] = field(default=())
    host: str | None = None
    lost_rows: int = 0

    @property
    def bytes(self) -> int:
        return sum(version.bytes for version in self.versions)


def read_captures(home: Path, model: str) -> CapturesView | None:
    """The view of a model's records; None when nothing was ever recorded. Looks at every file's name."""
    if not captures_folder(home, model).is_dir():
        return None
    parts = [part for folder in hour_folders(home, model) for part in parts_of_hour(folder)]
    kept = versions_kept((part.version, part.hour, part.rows, _size(part.path)) for part in parts)
    return captures_view(model, read_document(home, model), kept)


def captures_view(
    model: str, document: Mapping[str, Any], versions: Sequence[VersionCaptures], *, host: str | None = None
) -> CapturesView:
    """The view of a model's records out of counters.json and what is kept."""
    releases = Counters.of({"releases": document.get("releases", {})}).releases
    return CapturesView(
        model=model,
        requests=sum(each.requests for each in releases.values()),
        rows=sum(each.rows for each in releases.values()),
        dropped=sum(each.dropped for each in releases.values()),
        damaged=sum(each.damaged for each in releases.values()),
        releases=releases,
        versions=tuple(versions),
        host=host,
        lost_rows=document.get("lost_rows", 0),
    )


def models_captured(home: Path) -> list[str]:
    """The models that have records."""
    folder = captures_folder(home)
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def versions_kept(files: Iterable[tuple[int, str, int, int]]) -> list[VersionCaptures]:
    """What is kept of each version. `files`: version, hour, rows and bytes of each file."""
    found = []
    for version, group in groupby(sorted(files), key=itemgetter(0)):
        _, hours, rows, sizes = zip(*group, strict=True)
        found.append(
            VersionCaptures(
                version=version,
                hours=len(set(hours)),
                rows=sum(rows),
                bytes=sum(sizes),
                first_hour=hours[0],
                last_hour=hours[-1],
            )
        )
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # merged since it was listed
        return 0
