"""What an alarm says: the column, its bins then and now, since when, and in which segments. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from serin.monitoring.drift.detector import DriftDetector

_BINS = 5  # named in an alarm, those with the most evidence
_PART = 0.02  # of the evidence that a bin must hold to be named
_SEEN, _SEEN_PART = (
    4.0,
    0.25,
)  # log wealth of a bet that shows the shift in a segment; as a part of the alarm's
_HINT = 1.0  # ... in the bin of the alarm


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
    now = _now(detector, who)
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


def _now(detector: DriftDetector, who: int) -> float:
    return float(detector.evidence.hits[who] / max(detector.evidence.rows[who], 1.0))


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
