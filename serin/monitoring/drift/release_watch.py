"""The drift watch of one release: counts its recorded rows, feeds the detector, keeps alarms and the last day."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.bins import count_rows, renamed, table_times, unseen_values
from serin.evidence.e_detector import Array
from serin.formats.captures import column_names
from serin.formats.drift import UNSEEN, DriftStatistics
from serin.machine.typed_json import json2value
from serin.monitoring.drift.detector import Alarm, DriftDetector

_EXAMPLES: Final = 3  # of values that training never had
_PAST: Final = 50  # ended alarms that are kept
BUCKET_S: Final = 10_800
KEPT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAlarm:
    """An alarm that has ended, and when: the column was back within its tolerance."""

    alarm: Alarm
    ended: float


@dataclass(slots=True, kw_only=True, eq=False)
class ReleaseWatch:
    """`rows`: live rows that were counted, the newest of which arrived at `newest`. `alarms`: open ones by column."""

    statistics: DriftStatistics
    inputs: tuple[str, ...]
    detector: DriftDetector
    recent: RecentCounts
    rows: int = 0
    first: float | None = None
    newest: float | None = None
    alarms: dict[str, Alarm] = field(default_factory=dict)
    past: list[PastAlarm] = field(default_factory=list)
    unseen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # examples by column, not saved

    @classmethod
    def start(cls, statistics: DriftStatistics, inputs: Sequence[str]) -> ReleaseWatch:
        """A watch that has seen nothing. `inputs`: the request columns of the release."""
        detector = DriftDetector(statistics)
        recent = RecentCounts(len(detector.share))
        return cls(statistics=statistics, inputs=tuple(inputs), detector=detector, recent=recent)

    @property
    def columns(self) -> list[str]:
        """The columns of a part that are read."""
        own = column_names(self.inputs)
        return ["_t", "_source", *(own.get(each.field, each.field) for each in self.statistics.columns)]

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a part, or of a piece of it, that clients sent and that were answered to them."""
        table = table.filter(pc.equal(table.column("_source"), "live"))
        if not table.num_rows:
            return
        table = renamed(table, {name: own for own, name in column_names(self.inputs).items()})
        times = table_times(table, "_t")
        counted = count_rows(self.statistics, table, times)
        self._note_unseen(table, counted.counts)
        found = self.detector.observe(counted.starts, counted.counts)
        self.recent.add(np.asarray(counted.starts), counted.counts)
        self.rows += table.num_rows
        self.first = min(float(times.min()), self.first or np.inf)
        self.newest = max(float(times.max()), self.newest or 0.0)
        for recovery in found.recoveries:
            if ended := self.alarms.pop(recovery.column, None):
                self.past = [*self.past, PastAlarm(alarm=ended, ended=recovery.at)][-_PAST:]
        for alarm in found.alarms:
            shown = self.unseen.get(alarm.column, ()) if UNSEEN in {each.label for each in alarm.bins} else ()
            self.alarms[alarm.column] = replace(alarm, examples=shown)

    def _note_unseen(self, table: pa.Table, counts: Array) -> None:
        """Keeps three values of each column that training never had."""
        total = counts.sum(axis=0)
        for place, series in enumerate(self.statistics.series):
            column = self.statistics.columns[series.column]
            bin_ = int(self.detector.first_bin[place]) + column.bins - 2
            if series.segment is None and not series.quick and column.kind == "category" and total[bin_]:
                new = unseen_values(column, table, _EXAMPLES)
                held = [each for each in self.unseen.get(column.name, ()) if each not in new]
                self.unseen[column.name] = (*new, *held)[:_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "first": self.first,
            "newest": self.newest,
            "alarms": [asdict(alarm) for alarm in self.alarms.values()],
            "past": [asdict(each) for each in self.past],
            "recent": self.recent.to_json(),
            "detector": self.detector.state(),
        }

    @classmethod
    def from_json(
        cls, statistics: DriftStatistics, inputs: Sequence[str], document: Mapping[str, Any]
    ) -> ReleaseWatch:
        """The watch as it was; a new one when it belongs to other statistics."""
        made = cls.start(statistics, inputs)
        if document["detector"].get("statistics") != statistics.digest():
            return made
        made.detector = DriftDetector.resume(statistics, document["detector"])
        made.recent = RecentCounts.from_json(len(made.detector.share), document["recent"])
        made.rows, made.first, made.newest = document["rows"], document["first"], document["newest"]
        made.alarms = {alarm.column: alarm for alarm in json2value(tuple[Alarm, ...], document["alarms"])}
        made.past = json2value(list[PastAlarm], document["past"])
        return made


class RecentCounts:
    """Counts by bucket for the bins of all series. The newest eight buckets are kept."""

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._buckets: dict[int, Array] = {}

    def add(self, starts: Array, counts: Array) -> None:
        for bucket in np.unique(starts // BUCKET_S):
            rows = counts[starts // BUCKET_S == bucket].sum(axis=0)
            held = self._buckets.setdefault(int(bucket), np.zeros(self._bins, np.int64))
            held += rows
        for old in sorted(self._buckets)[:-KEPT]:
            del self._buckets[old]

    def total(self) -> Array:
        """The counts of all buckets together."""
        found: Array = np.sum([np.zeros(self._bins, np.int64), *self._buckets.values()], axis=0)
        return found

    @property
    def since(self) -> float | None:
        """The beginning of the oldest bucket (seconds since 1970)."""
        return float(min(self._buckets) * BUCKET_S) if self._buckets else None

    def to_json(self) -> dict[str, str]:
        return {str(bucket): _pack(counts) for bucket, counts in sorted(self._buckets.items())}

    @classmethod
    def from_json(cls, bins: int, document: Mapping[str, Any]) -> RecentCounts:
        made = cls(bins)
        for bucket, text in document.items():
            made._buckets[int(bucket)] = (
                np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(bins).copy()
            )
        return made


def _pack(counts: Array) -> str:
    return base64.b64encode(zlib.compress(counts.astype("<i8").tobytes(), 1)).decode()
