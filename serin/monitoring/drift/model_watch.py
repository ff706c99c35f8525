"""The drift watch of a model: counts the recorded rows of its releases, feeds their detectors, and keeps alarms and the
last day.

The state, <home>/watch/drift/<model>.json, has the last part of each home that was counted and all counts up to it. It
is replaced as a whole, so after a crash, or on another host, each part is counted exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.bins import count_rows, renamed, table_times, unseen_values
from serin.errors import FileBroken
from serin.evidence.e_process import Array
from serin.formats.captures import BULK, LIVE, Part, column_names
from serin.formats.drift import UNSEEN, DriftStatistics
from serin.machine.documents import UNFIT, read_json
from serin.machine.durable import write_whole
from serin.machine.typed_json import Document, Stored
from serin.monitoring.capture.read import Sources, batches, part_tables
from serin.monitoring.drift.detector import Alarm, DriftDetector, array2text, text2array

_ROUND_S: Final = 2.0  # the other duties of the watcher wait for so long
_EXAMPLES: Final = 3  # of values that training never had
_PAST: Final = 50  # ended alarms that are kept
_BUCKET_S: Final = 10_800
_BUCKETS: Final = 8
_COUNTS: Final = Stored(lambda text: text2array(text, np.int64), array2text)

_LOST = "restore it, or move it away: the drift of {model} is then watched from now on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A version to watch: its bundle's folder, its statistics for drift and its request columns."""

    version: int
    bundle: Path
    statistics: DriftStatistics
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAlarm:
    """An alarm that has ended, and when: the column was back within its tolerance."""

    alarm: Alarm
    ended: float


@dataclass(slots=True, kw_only=True)
class ReleaseState(Document):
    """What was counted of a release. `newest`: when the newest of its `rows` arrived. `alarms`: open ones by column.
    `recent`: the newest eight buckets of three hours, with the counts of the bins of all series. `detector`: as it was
    when this was stored."""

    bundle: str
    rows: int = 0
    first: float | None = None
    newest: float | None = None
    alarms: dict[str, Alarm] = field(default_factory=dict)
    past: tuple[PastAlarm, ...] = ()
    recent: dict[int, Annotated[Array, _COUNTS]] = field(default_factory=dict)
    detector: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState(Document, form="serin.drift_watch"):
    """The content of the file; see `ModelWatch`."""

    seen: dict[str, str]
    live: int | None
    told: tuple[str, ...]
    releases: dict[int, ReleaseState]
    live_edition: int = 1


class ReleaseWatch:
    """The watch of one release. It continues from `state`, or starts again when that is of other statistics. `inputs`:
    the request columns of the release. Raises what UNFIT names when the state is damaged."""

    def __init__(self, statistics: DriftStatistics, inputs: Sequence[str], state: ReleaseState) -> None:
        if state.detector.get("statistics") != statistics.digest():
            state = ReleaseState(bundle=state.bundle)
        self.statistics, self.inputs, self.state = statistics, tuple(inputs), state
        self.detector = DriftDetector.resume(statistics, state.detector)
        self._unseen: dict[str, tuple[str, ...]] = {}  # examples by column, not saved
        self.day_counts()  # their sizes must fit

    @property
    def columns(self) -> list[str]:
        """The columns of a part that are read."""
        names = column_names(self.inputs)
        return ["_t", "_source", *(names.get(each.field, each.field) for each in self.statistics.columns)]

    @property
    def day_since(self) -> float | None:
        """The beginning of the oldest bucket (seconds since 1970)."""
        return float(min(self.state.recent) * _BUCKET_S) if self.state.recent else None

    def day_counts(self) -> Array:
        """The counts of all buckets together."""
        zero = np.zeros(len(self.detector.share), np.int64)
        counts: Array = np.sum([zero, *self.state.recent.values()], axis=0)
        return counts

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a part, or of a piece of it, that clients sent or that a scheduled run has scored."""
        table = table.filter(pc.is_in(table.column("_source"), pa.array([LIVE, BULK])))
        if not table.num_rows:
            return
        table = renamed(table, {name: own for own, name in column_names(self.inputs).items()})
        times, state = table_times(table, "_t"), self.state
        counted = count_rows(self.statistics, table, times)
        self._note_unseen(table, counted.counts)
        found = self.detector.observe(counted.starts, counted.counts)
        self._add_to_day(np.asarray(counted.starts), counted.counts)
        state.rows += table.num_rows
        state.first = min(float(times.min()), state.first or np.inf)
        state.newest = max(float(times.max()), state.newest or 0.0)
        for recovery in found.recoveries:
            if ended := state.alarms.pop(recovery.column, None):
                state.past = (*state.past, PastAlarm(alarm=ended, ended=recovery.at))[-_PAST:]
        for alarm in found.alarms:
            examples = self._unseen.get(alarm.column, ())
            shown = examples if UNSEEN in {each.label for each in alarm.bins} else ()
            state.alarms[alarm.column] = replace(alarm, examples=shown)

    def _note_unseen(self, table: pa.Table, counts: Array) -> None:
        """Keeps three values of each column that training never had."""
        total = counts.sum(axis=0)
        for place, series in enumerate(self.statistics.series):
            column = self.statistics.columns[series.column]
            bin_ = int(self.detector.first_bin[place]) + column.bins - 2
            if series.segment is None and not series.quick and column.kind == "category" and total[bin_]:
                new = unseen_values(column, table, _EXAMPLES)
                earlier = [each for each in self._unseen.get(column.name, ()) if each not in new]
                self._unseen[column.name] = (*new, *earlier)[:_EXAMPLES]

    def _add_to_day(self, starts: Array, counts: Array) -> None:
        recent = self.state.recent
        for bucket in np.unique(starts // _BUCKET_S).tolist():
            rows = counts[starts // _BUCKET_S == bucket].sum(axis=0)
            recent[int(bucket)] = recent.get(int(bucket), 0) + rows.astype(np.int64)
        for old in sorted(recent)[:-_BUCKETS]:
            del recent[old]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelWatch:
    """`seen`: of each source of records the sequence of the last part that was counted. `live`: the version whose
    alarms are reported, with the edition of its lookups. `told`: the keys of the alerts that were fired."""

    home: Path
    model: str
    seen: dict[str, str] = field(default_factory=dict)
    live: int | None = None
    live_edition: int = 1
    told: tuple[str, ...] = ()
    releases: dict[int, ReleaseWatch] = field(default_factory=dict)

    @classmethod
    def load(cls, home: Path, model: str, watched: Mapping[int, Watched]) -> ModelWatch:
        """The watch as it was saved, of the versions that are still `watched`."""
        state, watch = read_state(home, model), cls(home=home, model=model)
        if state is not None:
            watch.seen, watch.told = dict(state.seen), state.told
            watch.live, watch.live_edition = state.live, state.live_edition
            for version, stored in state.releases.items():
                if found := watched.get(version):
                    stored = replace(stored, bundle=str(found.bundle))
                    watch.releases[version] = resume(home, model, found.statistics, found.inputs, stored)
        return watch

    def watch(self, wanted: Mapping[int, Watched], live: int | None, edition: int = 1) -> bool:
        """Starts the watch of new versions and ends that of others. Returns whether something changed. An edition of
        the live version continues its watch: what clients send does not depend on it."""
        before = (set(self.releases), self.live, self.live_edition)
        for version in set(self.releases) - set(wanted):
            del self.releases[version]
        for version, found in wanted.items():
            if version not in self.releases:
                fresh = ReleaseState(bundle=str(found.bundle))
                self.releases[version] = ReleaseWatch(found.statistics, found.inputs, fresh)
        self.live, self.live_edition = live, edition
        return before != (set(self.releases), live, edition)

    def follow(self, sources: Sources, *, clock: Callable[[], float] = time.monotonic) -> int:
        """Counts new parts, for about two seconds at most; returns how many. The rest is counted the next time."""
        began, counted = clock(), 0
        for name, source in sources.items():
            for found in batches(source, self.model, after=self.seen.get(name)):
                if not self._count(found):
                    break  # merged since it was listed: the next look finds its rows elsewhere
                self.seen[name] = found[-1].sequence
                counted += len(found)
                if clock() - began > _ROUND_S:
                    return counted
        return counted

    def _count(self, found: Sequence[Part]) -> bool:
        """Counts all of these parts, or none if a file is gone."""
        watched = [(release, part) for part in found if (release := self.releases.get(part.version))]
        opened = [(release, part_tables(part, release.columns)) for release, part in watched]
        if any(tables is None for _, tables in opened):
            return False
        for release, tables in opened:
            for table in tables or ():
                release.add(table)
        return True

    def save(self) -> None:
        releases = {
            version: replace(release.state, detector=release.detector.state())
            for version, release in self.releases.items()
        }
        state = WatchState(
            seen=self.seen,
            live=self.live,
            live_edition=self.live_edition,
            told=self.told,
            releases=releases,
        )
        path = state_file(self.home, self.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, state.dump())


def state_file(home: Path, model: str) -> Path:
    return home / "watch" / "drift" / f"{model}.json"


def read_state(home: Path, model: str) -> WatchState | None:
    """The content of the state file; None when there is none."""
    return read_json(state_file(home, model), WatchState.from_json, advice=_LOST.format(model=model))


def resume(
    home: Path, model: str, statistics: DriftStatistics, inputs: Sequence[str], state: ReleaseState
) -> ReleaseWatch:
    """The watch of a release as it was stored. Raises FileBroken."""
    try:
        return ReleaseWatch(statistics, inputs, state)
    except UNFIT as error:
        problem, advice = f"{type(error).__name__}: {error}", _LOST.format(model=model)
        raise FileBroken(path=state_file(home, model), problem=problem, advice=advice) from error
