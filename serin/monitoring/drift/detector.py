"""A model's drift detector: takes counts by minute, returns alarms. Pure: no clock, no file.

Blocks of a minute, an hour, a day or a week begin with the first row after the one before, and end when their time has
passed and they have at least 200 rows. So missing traffic is never drift, and rows with an earlier time (late ones, or
a clock that was set back) join the open block instead of making another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serin.evidence import e_detector
from serin.evidence.e_detector import Array
from serin.formats.drift import BLOCK_S, FEWEST_ROWS, YEAR_S, DriftStatistics
from serin.monitoring.drift.alarm import Alarm, Recovery, describe
from serin.monitoring.drift.quiet import QuietColumn
from serin.monitoring.drift.state import pack, unpack

_SET_BACK_S = 2 * 86_400.0  # a clock that was further ahead than this has been corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What some minutes brought: new alarms, and columns that are back within tolerance."""

    alarms: tuple[Alarm, ...] = ()
    recoveries: tuple[Recovery, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesEvidence:
    """How close a series is to an alarm: `evidence` and `threshold` in years of a false alarm's waiting time."""

    series: int
    evidence: float
    threshold: float


class DriftDetector:
    """Watches one release. `state()` is small and JSON-able; `resume(statistics, state)` continues exactly."""

    def __init__(self, statistics: DriftStatistics) -> None:
        self.statistics = statistics
        self._lay_out(statistics)
        size, groups = len(self.series_of_bin), len(self.group_length)
        self.open_counts = np.zeros(size)
        self.open_first = np.full(
            size, np.nan
        )  # the first minute of the open block in which the bin had rows
        self.open_rows = np.zeros(groups)
        self.open_start = np.full(groups, np.nan)
        self.evidence = e_detector.start(len(self.who))
        self.worth = np.zeros(len(self.who))  # of each bettor, in years
        self.quiet: dict[int, QuietColumn] = {}

    @classmethod
    def resume(cls, statistics: DriftStatistics, state: dict[str, Any] | None) -> DriftDetector:
        """A detector that continues from `state()`; a new one without a state, or with that of other statistics."""
        detector = cls(statistics)
        if state is not None and state.get("statistics") == statistics.digest():
            unpack(detector, state)
            detector.worth = e_detector.means(detector.evidence) * detector.years
        return detector

    def state(self) -> dict[str, Any]:
        return {"statistics": self.statistics.digest(), **pack(self)}

    def observe(self, minutes: Sequence[int] | Array, counts: Array) -> Findings:
        """Adds counts in the order of their minutes (see columns.bins.count_by_minute)."""
        alarms: list[Alarm] = []
        recoveries: list[Recovery] = []
        for minute, own in zip(np.asarray(minutes, dtype=np.float64), np.asarray(counts), strict=True):
            rows = np.add.reduceat(own, self.first_bin)[self.group_series]
            due = self._due(minute, rows)
            if due.any():
                self._close(due)
                recoveries += self._recovered(due, minute)
                alarms += self._alarms(minute)
                self._reopen(due, minute)
            self._begin(minute, rows)
            self.open_first = np.where((own > 0) & np.isnan(self.open_first), minute, self.open_first)
            self.open_counts += own
            self.open_rows += rows
        return Findings(alarms=tuple(alarms), recoveries=tuple(recoveries))

    def levels(self) -> tuple[SeriesEvidence, ...]:
        """How close each series is to an alarm."""
        scores = self._scores()
        return tuple(
            SeriesEvidence(series=place, evidence=float(score), threshold=float(self.threshold[place]))
            for place, score in enumerate(scores)
        )

    def _lay_out(self, statistics: DriftStatistics) -> None:
        """Puts the bins of all series one after the other. A group is the bins of a series with the same block."""
        series = statistics.series
        sizes = [len(each.share) for each in series]
        self.first_bin = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.series_of_bin = np.repeat(np.arange(len(series)), sizes)
        self.share = np.concatenate([np.asarray(each.share) for each in series])
        self.tolerance = np.concatenate([np.asarray(each.tolerance) for each in series])
        cap = np.concatenate([np.asarray(each.cap) for each in series])
        capped = np.concatenate([np.asarray(each.capped) for each in series])
        length = np.concatenate([[BLOCK_S[block] for block in each.block] for each in series])
        pairs, self.group_of_bin = np.unique(
            np.stack([self.series_of_bin, length], axis=1), axis=0, return_inverse=True
        )
        self.group_of_bin = self.group_of_bin.reshape(-1)
        self.group_series, self.group_length = pairs[:, 0].astype(np.int64), pairs[:, 1]
        self.who = e_detector.bettors(self.share, cap, capped, self.tolerance)
        self.series_of_bettor = self.series_of_bin[self.who.bin]
        self.group_of_bettor = self.group_of_bin[self.who.bin]
        own = np.maximum(np.bincount(self.series_of_bettor, minlength=len(series)), 1)
        self.years = length[self.who.bin] / YEAR_S / own[self.series_of_bettor]
        weight = np.asarray([each.weight for each in series])
        self.threshold = 1.0 / (weight * statistics.false_alarms)
        self.column_of_series = np.asarray([each.column for each in series])

    def _due(self, minute: float, rows: Array) -> Array:
        """Which groups have a block that ends before this minute."""
        with np.errstate(invalid="ignore"):
            due: Array = (
                (rows > 0) & (minute >= self.open_start + self.group_length) & (self.open_rows >= FEWEST_ROWS)
            )
        return due

    def _close(self, due: Array) -> None:
        chosen = np.flatnonzero(due[self.group_of_bettor] & ~self._is_quiet()[self.series_of_bettor])
        group = self.group_of_bettor[chosen]
        hits = self.open_counts[self.who.bin[chosen]]
        e_detector.advance(self.evidence, self.who, chosen, hits, self.open_rows[group], self._began(chosen))
        self.worth[chosen] = e_detector.means(self.evidence, chosen) * self.years[chosen]

    def _began(self, chosen: Array) -> Array:
        """When what the chosen bettors see in the open block began. A block may be open over a pause in the traffic:
        values that it did not have before began with their first row."""
        start = self.open_start[self.group_of_bettor[chosen]]
        first = np.where(self.who.sign[chosen] > 0, self.open_first[self.who.bin[chosen]], start)
        began: Array = np.fmax(first, start)
        return began

    def _is_quiet(self) -> Array:
        """Which series belong to a column that has alarmed and is not back yet."""
        return np.isin(self.column_of_series, list(self.quiet))

    def _scores(self) -> Array:
        return np.bincount(self.series_of_bettor, weights=self.worth, minlength=len(self.threshold))

    def _alarms(self, minute: float) -> Iterator[Alarm]:
        over = np.flatnonzero(self._scores() >= self.threshold)
        overall_first = sorted(over, key=lambda place: self.statistics.series[place].segment is not None)
        for place in overall_first:
            column = int(self.column_of_series[place])
            if column in self.quiet:  # another series of the column was named a moment ago
                continue
            alarm = describe(self, int(place), minute)
            self.quiet[column] = QuietColumn.after(alarm, self)
            silent = np.flatnonzero(self.column_of_series[self.series_of_bettor] == column)
            e_detector.forget(self.evidence, silent)
            self.worth[silent] = 0.0
            yield alarm

    def _recovered(self, due: Array, minute: float) -> Iterator[Recovery]:
        for column, quiet in list(self.quiet.items()):
            if quiet.add_blocks(self, due):
                del self.quiet[column]
                yield Recovery(column=self.statistics.columns[column].name, at=minute, since=quiet.since)

    def _reopen(self, due: Array, minute: float) -> None:
        """The next block begins where the last one ended, or now after a pause."""
        self.open_counts[due[self.group_of_bin]] = 0
        self.open_first[due[self.group_of_bin]] = np.nan
        self.open_rows[due] = 0
        ended = self.open_start + self.group_length
        follows = minute < ended + self.group_length
        self.open_start = np.where(due, np.where(follows, ended, minute), self.open_start)

    def _begin(self, minute: float, rows: Array) -> None:
        ahead = self.open_start - minute > np.maximum(2 * self.group_length, _SET_BACK_S)
        fresh = (rows > 0) & (np.isnan(self.open_start) | ahead)
        self.open_start = np.where(fresh, minute, self.open_start)
        self.open_first[fresh[self.group_of_bin]] = np.nan
