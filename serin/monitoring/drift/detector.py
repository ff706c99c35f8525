"""A model's drift detector: takes counts by ten seconds, returns alarms. Pure: no clock, no file.

Blocks of ten seconds up to a week begin with the first row after the one before, and end when their time has passed
and they have enough rows. So missing traffic is never drift, and rows with an earlier time (late ones, or
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
    """What some rows brought: new alarms, and columns that are back within tolerance."""

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
        )  # the first moment of the open block in which the bin had rows
        self.open_rows = np.zeros(groups)
        self.open_start = np.full(groups, np.nan)
        self.waited = np.ones(groups)  # what bettors start with in the open block, in blocks
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

    def observe(self, starts: Sequence[int] | Array, counts: Array) -> Findings:
        """Adds counts in the order of their starts (see columns.bins.count_rows)."""
        alarms: list[Alarm] = []
        recoveries: list[Recovery] = []
        for moment, own in zip(np.asarray(starts, dtype=np.float64), np.asarray(counts), strict=True):
            rows = np.add.reduceat(own, self.first_bin)[self.group_series]
            due = self._due(moment, rows)
            if due.any():
                self._close(due)
                recoveries += self._recovered(due, moment)
                alarms += self._alarms(moment)
                self._reopen(due, moment)
            self._begin(moment, rows)
            self.open_first = np.where((own > 0) & np.isnan(self.open_first), moment, self.open_first)
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
        expected = e_detector.Expected(
            share=self.share,
            floor=np.concatenate([each.floor for each in series]),
            floored=np.concatenate([each.floored for each in series]),
            cap=np.concatenate([each.cap for each in series]),
            capped=np.concatenate([each.capped for each in series]),
            rows=np.concatenate([each.block_rows for each in series]),
        )
        quick = np.repeat([each.quick for each in series], sizes)
        least = np.where(quick, expected.capped, self.share) - self.tolerance
        most = np.where(quick, expected.floored, self.share) + self.tolerance
        self.within = np.stack([least, most])  # shares of a bin that are not drift
        length = np.concatenate([[BLOCK_S[block] for block in each.block] for each in series])
        pairs, self.group_of_bin = np.unique(
            np.stack([self.series_of_bin, length], axis=1), axis=0, return_inverse=True
        )
        self.group_of_bin = self.group_of_bin.reshape(-1)
        self.group_series, self.group_length = pairs[:, 0].astype(np.int64), pairs[:, 1]
        fewest = {BLOCK_S[block]: rows for block, rows in FEWEST_ROWS.items()}
        self.fewest_rows = np.asarray([fewest[float(each)] for each in self.group_length])
        self.who = e_detector.bettors(expected, self.tolerance)
        self.series_of_bettor = self.series_of_bin[self.who.bin]
        self.group_of_bettor = self.group_of_bin[self.who.bin]
        columns = [statistics.columns[each.column] for each in series]
        apart = np.concatenate([np.arange(each.bins) >= each.bins - each.outside for each in columns])
        part = e_detector.weights(self.who, self.series_of_bettor, apart)
        self.years = length[self.who.bin] / YEAR_S * part
        weight = np.asarray([each.weight for each in series])
        self.threshold = 1.0 / (weight * statistics.false_alarms)
        self.column_of_series = np.asarray([each.column for each in series])

    def _due(self, moment: float, rows: Array) -> Array:
        """Which groups have a block that ends before this moment."""
        with np.errstate(invalid="ignore"):
            due: Array = (
                (rows > 0)
                & (moment >= self.open_start + self.group_length)
                & (self.open_rows >= self.fewest_rows)
            )
        return due

    def _close(self, due: Array) -> None:
        chosen = np.flatnonzero(due[self.group_of_bettor] & ~self._is_quiet()[self.series_of_bettor])
        group = self.group_of_bettor[chosen]
        hits = self.hits()[self.who.bin[chosen]]
        e_detector.advance(
            self.evidence,
            self.who,
            chosen,
            hits=hits,
            rows=self.open_rows[group],
            began=self._began(chosen),
            waited=self.waited[group],
        )
        self.worth[chosen] = e_detector.means(self.evidence, chosen) * self.years[chosen]

    def hits(self) -> Array:
        """The counts of the open blocks as their series take them."""
        found = self.open_counts.copy()
        for place, series in enumerate(self.statistics.series):
            if series.quick:
                own = slice(self.first_bin[place], self.first_bin[place] + len(series.share))
                found[own] = self.statistics.columns[series.column].cumulated(found[own])
        return found

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

    def _alarms(self, moment: float) -> Iterator[Alarm]:
        over = np.flatnonzero(self._scores() >= self.threshold)
        overall_first = sorted(over, key=lambda place: self.statistics.series[place].segment is not None)
        for place in overall_first:
            column = int(self.column_of_series[place])
            if column in self.quiet:  # another series of the column was named a moment ago
                continue
            alarm = describe(self, int(place), moment)
            self.quiet[column] = QuietColumn.after(alarm, self)
            silent = np.flatnonzero(self.column_of_series[self.series_of_bettor] == column)
            e_detector.forget(self.evidence, silent)
            self.worth[silent] = 0.0
            yield alarm

    def _recovered(self, due: Array, moment: float) -> Iterator[Recovery]:
        for column, quiet in list(self.quiet.items()):
            if quiet.add_blocks(self, due):
                del self.quiet[column]
                yield Recovery(column=self.statistics.columns[column].name, at=moment, since=quiet.since)

    def _reopen(self, due: Array, moment: float) -> None:
        """The next block begins where the last one ended, or now after a pause."""
        self.open_counts[due[self.group_of_bin]] = 0
        self.open_first[due[self.group_of_bin]] = np.nan
        self.open_rows[due] = 0
        took = e_detector.waited(moment - self.open_start, self.group_length)
        self.waited = np.where(due, took, self.waited)
        ended = self.open_start + self.group_length
        follows = moment < ended + self.group_length
        self.open_start = np.where(due, np.where(follows, ended, moment), self.open_start)

    def _begin(self, moment: float, rows: Array) -> None:
        ahead = self.open_start - moment > np.maximum(2 * self.group_length, _SET_BACK_S)
        fresh = (rows > 0) & (np.isnan(self.open_start) | ahead)
        self.open_start = np.where(fresh, moment, self.open_start)
        self.open_first[fresh[self.group_of_bin]] = np.nan
