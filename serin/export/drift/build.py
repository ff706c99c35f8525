"""Makes the drift statistics of a version from its training rows and its own scores on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serin.columns.column import Array
from serin.export.drift.choose_bins import Binned, Source, bin_column
from serin.export.drift.tolerance import Replay, smallest_kappa, tolerances
from serin.export.drift.training_blocks import (
    WEEK_S,
    Cut,
    blocks_of,
    choose_block,
    cut_evenly,
    cut_time,
    longer,
    weekly_deviation,
)
from serin.formats.drift import BLOCK_S, FEWEST_ROWS, Block, DriftSeries, DriftStatistics, Segment
from serin.formats.wire import TrainingRows
from serin.machine.stopping import check_stopped
from serin.spec.monitoring import DriftSpec

logger = logging.getLogger(__name__)

_SEGMENTS = 8  # values of a column in `export.segments` that are watched separately, the most frequent
_PARTS = 8  # of a table without a time, in which values may be new
_SEGMENT_SHARE = 0.02  # of the rows that such a value must have


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A series before it has a tolerance."""

    column: int
    segment: Segment | None
    rows: int
    blocks: list[Block]
    replay: Replay


def make_statistics(
    rows: TrainingRows,
    sources: Sequence[Source],
    *,
    segments: Sequence[str],
    spec: DriftSpec,
    importance: Mapping[str, float],
) -> DriftStatistics:
    """The statistics of all columns. `segments`: names of columns among `sources`. `importance`: of request columns."""
    times, weeks = rows.times, complete_weeks(rows)
    period = _periods(rows)
    binned = [bin_column(source, rows.table, period) for source in sources]
    masks = _segment_masks(binned, segments)
    parts: list[_Part] = []
    for segment, mask in [(None, None), *masks]:
        inside = np.arange(len(rows.table)) if mask is None else np.flatnonzero(mask)
        cuts = _cuts(None if times is None else times[inside], len(inside), times)
        check_stopped()
        parts += [
            _part(place, each, segment, inside, cuts, spec, weeks, _least(each, parts, place))
            for place, each in enumerate(binned)
            if segment is None or place != segment.column
        ]
    weights = _weights(binned, parts, importance)
    kappa = None if spec.tolerance is not None else _kappa(parts, weights, spec.false_alarms)
    series = tuple(_series(part, weight, spec, kappa) for part, weight in zip(parts, weights, strict=True))
    return DriftStatistics(
        columns=tuple(each.column for each in binned),
        series=series,
        false_alarms=spec.false_alarms,
        origin="weeks" if spec.tolerance is None else "spec",
        kappa=kappa,
        weeks=weeks,
        rows=len(rows.table),
        total_rows=rows.total,
        first=None if times is None else float(times[0]),
        last=None if times is None else float(times[-1]),
    )


def _least(binned: Binned, parts: Sequence[_Part], place: int) -> Block:
    """A segment's block is at least that of all rows. The hours of a time are those of the blocks, so it takes days."""
    if binned.column.kind == "timestamp":
        return "day"
    whole = next((part.blocks[0] for part in parts if part.column == place), None)
    return whole or "minute"


def complete_weeks(rows: TrainingRows) -> int:
    """Complete weeks from the first row to the last."""
    return 0 if rows.times is None else int((rows.times[-1] - rows.times[0]) // WEEK_S)


def _periods(rows: TrainingRows) -> Array:
    """The week of each row, or its part of the table."""
    if rows.times is None:
        return np.arange(len(rows)) * _PARTS // max(len(rows), 1)
    weeks: Array = np.floor((rows.times - rows.times[0]) / WEEK_S).astype(np.int64)
    return weeks


def _segment_masks(binned: Sequence[Binned], names: Sequence[str]) -> list[tuple[Segment, Array]]:
    """The rows of each value of the segment columns that is frequent enough."""
    found = []
    for place, each in enumerate(binned):
        if each.column.name not in names or each.column.kind != "category":
            continue
        for category in range(min(len(each.column.categories), _SEGMENTS)):
            mask = each.codes == category
            if mask.mean() >= _SEGMENT_SHARE and mask.sum() >= 5 * FEWEST_ROWS:
                found.append((Segment(column=place, category=category), mask))
    return found


def _cuts(own: Array | None, rows: int, times: Array | None) -> dict[Block, Cut]:
    if own is None or times is None:
        return {"minute": cut_evenly(rows)}
    return {name: cut_time(own, length, float(times[0])) for name, length in BLOCK_S.items()}


def _part(
    place: int,
    binned: Binned,
    segment: Segment | None,
    inside: Array,
    cuts: Mapping[Block, Cut],
    spec: DriftSpec,
    weeks: int,
    least: Block,
) -> _Part:
    """Chooses the block of each bin, at least as long as `least`, and takes its shares there."""
    column, codes = binned.column, binned.codes[inside]
    shares = {name: cut.shares(codes, column.bins) for name, cut in cuts.items()}
    if "day" not in shares or spec.block is not None:
        block: Block = spec.block or "day"
    else:
        block = longer(least, choose_block(shares, cuts))
    blocks = blocks_of(column, shares["minute"], block)
    taken: list[tuple[Block, Array, Array]] = []
    share, cap, capped, deviation = (np.zeros(column.bins) for _ in range(4))
    for name in dict.fromkeys(blocks):
        bins = np.flatnonzero([block == name for block in blocks])
        level = name if name in shares else "minute"
        own, cut = shares[level][:, bins], cuts[level]
        if binned.fresh:
            own = _later_half(own, bins, column.bins, cut)
        taken.append((name, bins, own))
        share[bins] = own.mean(axis=0)
        cap[bins] = _caps(own)
        lower = np.minimum(own, cap[bins])
        capped[bins] = lower.mean(axis=0)
        deviation[bins] = np.maximum(weekly_deviation(own, cut, weeks), weekly_deviation(lower, cut, weeks))
    replay = Replay(shares=taken, share=share, cap=cap, capped=capped, deviation=deviation)
    return _Part(column=place, segment=segment, rows=len(inside), blocks=blocks, replay=replay)


def _caps(shares: Array) -> Array:
    """Beyond which a share counts no further when less is bet on: a small cap allows a larger stake."""
    return np.median(shares, axis=0)


def _later_half(own: Array, bins: Array, size: int, cut: Cut) -> Array:
    """Values that were new when they came are known for the second half of the weeks alone. The blocks of the first
    half get the second one's mean share of unseen and of other known values."""
    late = cut.week > (int(cut.week.max(initial=0)) - 1) // 2
    apart = np.isin(bins, (size - 3, size - 2))
    if not late.any() or late.all() or not apart.any():
        return own
    own = own.copy()
    own[np.ix_(~late, apart)] = own[np.ix_(late, apart)].mean(axis=0)
    return own


def _weights(
    binned: Sequence[Binned], parts: Sequence[_Part], importance: Mapping[str, float]
) -> list[float]:
    """Half of the weight is spread evenly over the columns, half by importance; a score counts as the most important
    column. Half of a column's weight is for all rows, half for its segments."""
    losses = {name: max(value, 0.0) for name, value in importance.items()}
    most = max(losses.values(), default=0.0)
    worth = np.asarray(
        [most if each.column.source == "score" else losses.get(each.column.name, 0.0) for each in binned]
    )
    by_importance = worth / worth.sum() if worth.sum() > 0 else np.full(len(binned), 1 / len(binned))
    of_column = 0.5 / len(binned) + 0.5 * by_importance
    segments = np.bincount([part.column for part in parts], minlength=len(binned)) - 1
    weights = []
    for part in parts:
        shared = segments[part.column]
        own = 1.0 if not shared else 0.5 if part.segment is None else 0.5 / shared
        weights.append(float(of_column[part.column] * own))
    return weights


def _kappa(parts: Sequence[_Part], weights: Sequence[float], false_alarms: float) -> float:
    """One factor for all series: the largest that one of them needs."""
    found = []
    for part, weight in zip(parts, weights, strict=True):
        check_stopped()
        found.append(smallest_kappa(part.replay, 1.0 / (weight * false_alarms)))
    return max(found)


def _series(part: _Part, weight: float, spec: DriftSpec, kappa: float | None) -> DriftSeries:
    replay = part.replay
    if kappa is None:
        assert spec.tolerance is not None
        tolerance = np.full(len(replay.share), spec.tolerance)
    else:
        tolerance = tolerances(replay, kappa)
    return DriftSeries(
        column=part.column,
        segment=part.segment,
        weight=weight,
        rows=part.rows,
        share=_rounded(replay.share),
        cap=_rounded(replay.cap),
        capped=_rounded(replay.capped),
        tolerance=_rounded(tolerance),
        block=tuple(part.blocks),
    )


def _rounded(values: Array) -> tuple[float, ...]:
    return tuple(round(float(value), 9) for value in values)
