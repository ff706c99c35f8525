"""A model's drift detector: takes counts by ten seconds, returns alarms. Pure: no clock, no file.

Blocks of ten seconds up to a week begin with the first row after the one before, and end when their time has passed
and they have enough rows. So missing traffic is never drift, and rows with an earlier time (late ones, or
a clock that was set back) join the open block instead of making another.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from serin.evidence import e_detector
from serin.evidence.e_process import Array
from serin.formats.drift import BLOCK_S, FEWEST_ROWS, YEAR_S, DriftStatistics
from serin.machine.typed_json import checked, json2value

_SET_BACK_S = 2 * 86_400.0  # a clock that was further ahead than this has been corrected
FORMAT, VERSION = "serin.drift_state", 2
# blocks over which a share must be within tolerance, by the length of a block
_BLOCKS = {10.0: 24, 60.0: 10, 3600.0: 6, 86_400.0: 3, 604_800.0: 1}
_BINS = 5  # named in an alarm, those with the most evidence
_PART = 0.02  # of the evidence that a bin must hold to be named
_SEEN = 4.0  # log wealth of a bet that shows the shift in a segment ...
_SEEN_PART = 0.25  # ... at least this part of the alarm's
_HINT = 1.0  # ... in the bin of the alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What some rows brought: new alarms, and columns that are back within tolerance."""

    alarms: tuple[Alarm, ...] = ()
    recoveries: tuple[Recovery, ...] = ()


class DriftDetector:
    """Watches one release. `state()` is small and JSON-able; `resume(statistics, state)` continues exactly."""

    def __init__(self, statistics: DriftStatistics) -> None:
        self.statistics = statistics
        self._lay_out(statistics)
        size, groups = len(self.series_of_bin), len(self.group_length)
        self.open_counts = np.zeros(size)
        # The first moment of the open block in which the bin had rows.
        self.open_first = np.full(size, np.nan)
        self.open_rows = np.zeros(groups)
        self.open_start = np.full(groups, np.nan)
        self.waited = np.ones(groups)  # what bettors start with in the open block, in blocks
        self.evidence = e_detector.start(len(self.who))
        self.worth = np.zeros(len(self.who))  # of each bettor, in years
        self.quiet: dict[int, QuietColumn] = {}

    @classmethod
    def resume(cls, statistics: DriftStatistics, state: dict[str, Any] | None) -> DriftDetector:
        """A detector that continues from `state()`; a new one without a state, or with that of other statistics. Raises
        ValueError or KeyError when the state does not fit."""
        detector = cls(statistics)
        if state is not None and state.get("statistics") == statistics.digest():
            state = checked(state, FORMAT, VERSION)
            for name, values in detector._arrays().items():
                values[...] = text2array(state["arrays"][name], values.dtype).reshape(values.shape)
            detector.quiet = {entry["column"]: json2value(QuietColumn, entry) for entry in state["quiet"]}
            detector.worth = e_detector.means(detector.evidence) * detector.years
        return detector

    def state(self) -> dict[str, Any]:
        quiet = [{"column": column, **asdict(each)} for column, each in sorted(self.quiet.items())]
        arrays = {name: array2text(values) for name, values in self._arrays().items()}
        head = {"statistics": self.statistics.digest(), "format": FORMAT, "version": VERSION}
        return {**head, "arrays": arrays, "quiet": quiet}

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

    def levels(self) -> list[float]:
        """How close each series is to an alarm: its evidence as a share of what an alarm needs."""
        return [float(level) for level in self._scores() / self.threshold]

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
        summed = [
            first + np.asarray(column.by_value)
            for first, each, column in zip(self.first_bin, series, columns, strict=True)
            if each.quick and column.kind == "number"
        ]
        self.summed = np.concatenate([np.empty(0, np.int64), *summed])  # bins, those of a series by value
        ends = np.cumsum([0, *map(len, summed)])
        self.first_summed = np.repeat(ends[:-1], np.diff(ends))

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
        quiet = np.isin(self.column_of_series, list(self.quiet))  # has alarmed and is not back yet
        chosen = np.flatnonzero(due[self.group_of_bettor] & ~quiet[self.series_of_bettor])
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
        """The counts of the open blocks as their series take them: BinnedColumn.cumulated, for all series at once."""
        found, own = self.open_counts.copy(), self.open_counts[self.summed]
        totals = own.cumsum()
        found[self.summed] = totals - (totals - own)[self.first_summed]
        return found

    def _began(self, chosen: Array) -> Array:
        """When what the chosen bettors see in the open block began. A block may be open over a pause in the traffic:
        values that it did not have before began with their first row."""
        start = self.open_start[self.group_of_bettor[chosen]]
        first = np.where(self.who.sign[chosen] > 0, self.open_first[self.who.bin[chosen]], start)
        began: Array = np.fmax(first, start)
        return began

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

    def _arrays(self) -> dict[str, Array]:
        """What is stored, and filled again by `resume`."""
        evidence = self.evidence
        return {
            "open_counts": self.open_counts,
            "open_first": self.open_first,
            "open_rows": self.open_rows,
            "open_start": self.open_start,
            "waited": self.waited,
            **{name: getattr(evidence, name) for name in ("log_m", "run", "since", "hits", "rows")},
        }

    def _begin(self, moment: float, rows: Array) -> None:
        ahead = self.open_start - moment > np.maximum(2 * self.group_length, _SET_BACK_S)
        fresh = (rows > 0) & (np.isnan(self.open_start) | ahead)
        self.open_start = np.where(fresh, moment, self.open_start)
        self.open_first[fresh[self.group_of_bin]] = np.nan


def array2text(values: Array) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 1)).decode()


def text2array(text: str, dtype: Any) -> Array:
    """The values that `array2text` has written, in one row. Raises ValueError for anything else."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
    except zlib.error as error:
        raise ValueError(str(error)) from error


@dataclass(slots=True, kw_only=True)
class QuietBin:
    """A bin that alarmed, by its place among all bins, and its counts in the blocks since it was last looked at."""

    place: int
    blocks: int = 0
    hits: float = 0.0
    rows: float = 0.0
    back: bool = False


@dataclass(slots=True, kw_only=True)
class QuietColumn:
    """`since`: when the alarm's shift began."""

    since: float
    bins: list[QuietBin]

    @classmethod
    def after(cls, alarm: Alarm, detector: DriftDetector) -> QuietColumn:
        first = int(detector.first_bin[alarm.series])
        return cls(since=alarm.since, bins=[QuietBin(place=first + shift.bin) for shift in alarm.bins])

    def add_blocks(self, detector: DriftDetector, due: Array) -> bool:
        """Adds the blocks that have just ended, and says whether the column is back."""
        hits = detector.hits()
        for each in self.bins:
            group = int(detector.group_of_bin[each.place])
            if not due[group]:
                continue
            each.blocks += 1
            each.hits += float(hits[each.place])
            each.rows += float(detector.open_rows[group])
            if each.blocks >= _BLOCKS[float(detector.group_length[group])]:
                low, high = detector.within[:, each.place]
                each.back = bool(low <= each.hits / each.rows <= high)
                each.blocks, each.hits, each.rows = 0, 0.0, 0.0
        return all(each.back for each in self.bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinShift:
    """One bin of an alarm. `then`: its share in training; `now`: since the change began. `beyond`: how far the share is
    outside the tolerance."""

    bin: int
    label: str
    direction: Literal["more", "less"]
    then: float
    now: float
    tolerance: float
    beyond: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A column has drifted. `bins`: the most evidence first. `segments`: where the shift is seen when it is not
    everywhere, such as origin=JFK. `since`: when it began, `at`: when it was known (seconds since 1970). `rows`: how
    many it took from the one to the other. `series`: the place in the statistics. `examples`: some of the values that
    training never had, the newest first, where such values are part of the alarm."""

    series: int
    column: str
    source: Literal["request", "score"]
    segments: tuple[str, ...]
    bins: tuple[BinShift, ...]
    size: float
    since: float
    at: float
    rows: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A column that is back within its tolerance. `since`: of the alarm that it ends."""

    column: str
    at: float
    since: float


def describe(detector: DriftDetector, series: int, at: float) -> Alarm:
    """The alarm of a series that has reached its threshold."""
    statistics, evidence = detector.statistics, detector.evidence
    own = np.flatnonzero(detector.series_of_bettor == series)
    worth = detector.worth[own]
    order = own[np.argsort(-worth, kind="stable")]
    share = np.sort(worth)[::-1] / max(worth.sum(), 1e-300)
    named = [int(who) for who, part in zip(order[:_BINS], share, strict=False) if part >= _PART] or [
        int(order[0])
    ]
    column = statistics.columns[statistics.series[series].column]
    bins = tuple(_shift(detector, who, series) for who in named)
    return Alarm(
        series=series,
        column=column.name,
        source=column.source,
        segments=_segments(detector, series, named[0]),
        bins=bins,
        size=max(shift.beyond for shift in bins),
        since=min(float(evidence.since[named[0]]), float(at)),  # a clock may have been set back
        at=float(at),
        rows=int(evidence.rows[named[0]]),
    )


def _shift(detector: DriftDetector, who: int, series: int) -> BinShift:
    place = int(detector.who.bin[who])
    inside = place - int(detector.first_bin[series])
    then, tolerance = float(detector.share[place]), float(detector.tolerance[place])
    now = float(detector.evidence.hits[who] / max(detector.evidence.rows[who], 1.0))
    column = detector.statistics.columns[detector.statistics.series[series].column]
    return BinShift(
        bin=inside,
        label=column.series_labels(quick=detector.statistics.series[series].quick)[inside],
        direction="more" if detector.who.sign[who] > 0 else "less",
        then=then,
        now=now,
        tolerance=tolerance,
        beyond=max(abs(now - then) - tolerance, 0.0),
    )


def _segments(detector: DriftDetector, series: int, who: int) -> tuple[str, ...]:
    """The segments that show the same shift, or a clear one in other bins, by the column of `export.segments` with the
    fewest of them; none when all do."""
    statistics = detector.statistics
    alarmed = statistics.series[series]
    inside = detector.who.bin[who] - detector.first_bin[series]
    sign = detector.who.sign[who]
    least = max(_SEEN, _SEEN_PART * float(detector.evidence.run[who]))
    by_column: dict[int, dict[str, bool]] = {}  # whether one of a segment's series shows it
    for place, other in enumerate(statistics.series):
        if other.column == alarmed.column and other.segment is not None:
            own = detector.series_of_bettor == place
            same = (
                own & (detector.who.bin - detector.first_bin[place] == inside) & (detector.who.sign == sign)
            )
            run = detector.evidence.run
            seen = place == series or bool((run[own] >= least).any() or (run[same] >= _HINT).any())
            segments = by_column.setdefault(other.segment.column, {})
            name = statistics.segment_name(other.segment)
            segments[name] = seen or segments.get(name, False)
    if alarmed.segment is not None:
        by_column = {alarmed.segment.column: by_column[alarmed.segment.column]}
    parts = [
        (sum(found.values()) / len(found), tuple(name for name, seen in found.items() if seen))
        for found in by_column.values()
    ]
    some = [part for part in parts if 0 < part[0] < 1]
    return min(some)[1] if some else ()
