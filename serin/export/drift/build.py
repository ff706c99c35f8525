"""Makes the drift statistics of a version from its training rows and its own scores on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serin.columns.column import Array
from serin.evidence.e_detector import Expected
from serin.export.drift.choose_bins import Binned, Source, bin_column
from serin.export.drift.tolerance import Replay, smallest_kappa
from serin.export.drift.training_blocks import (
    WEEK_S,
    Cut,
    blocks_of,
    choose_block,
    cut_evenly,
    cut_time,
    local_means,
    longer,
    shows_a_day,
    weekly_deviation,
)
from serin.formats.drift import BLOCK_S, SHORTEST, BinnedColumn, Block, DriftSeries, DriftStatistics, Segment
from serin.formats.wire import TrainingRows
from serin.machine.stopping import check_stopped
from serin.spec.monitoring import FEWEST_WEEKS, DriftSpec

_SEGMENTS = 8  # values of a column in `export.segments` that are watched separately, the most frequent
_PARTS = 8  # of a table without a time, in which values may be new
_SEGMENT_SHARE, _SEGMENT_ROWS = 0.02, 1000  # that such a value must have, of all rows and at least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A series before it has a tolerance."""

    column: int
    segment: Segment | None
    rows: int
    blocks: list[Block]
    replay: Replay

    @property
    def quick(self) -> bool:
        return isinstance(self.replay.deviation, tuple)


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
        for place, each in enumerate(binned):
            if segment is None or place != segment.column:
                part = _part(place, each, segment, inside, cuts, spec, weeks, _least(each, parts, place))
                parts.append(part)
                if weeks >= FEWEST_WEEKS and spec.block is None:
                    parts += _quick(part, each, inside, cuts[SHORTEST])
    weights = _weights(binned, parts, importance)
    kappas = _kappas(parts, weights, spec)
    series = tuple(
        _series(part, weight, kappa, spec.tolerance)
        for part, weight, kappa in zip(parts, weights, kappas, strict=True)
    )
    return DriftStatistics(
        columns=tuple(each.column for each in binned),
        series=series,
        false_alarms=spec.false_alarms,
        origin="weeks" if spec.tolerance is None else "spec",
        kappa=None if spec.tolerance is not None else kappas[0],
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
    return whole or SHORTEST


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
            if mask.mean() >= _SEGMENT_SHARE and mask.sum() >= _SEGMENT_ROWS:
                found.append((Segment(column=place, category=category), mask))
    return found


def _cuts(own: Array | None, rows: int, times: Array | None) -> dict[Block, Cut]:
    if own is None or times is None:
        return {SHORTEST: cut_evenly(rows)}
    return {name: cut_time(own, name, float(times[0])) for name in BLOCK_S}


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
    blocks = blocks_of(column, shares[SHORTEST], block)
    taken: list[tuple[Block, Array, Array, Array]] = []
    share, middle, floored, capped, block_rows, deviation = (np.zeros(column.bins) for _ in range(6))
    for name in dict.fromkeys(blocks):
        bins = np.flatnonzero([block == name for block in blocks])
        level = name if name in shares else SHORTEST
        own, cut = shares[level][:, bins], cuts[level]
        if binned.fresh:
            own = _later_half(own, bins, column.bins, cut)
        taken.append((name, bins, own, cut.lasts))
        share[bins], middle[bins] = own.mean(axis=0), np.median(own, axis=0)
        lower, upper = np.minimum(own, middle[bins]), np.maximum(own, middle[bins])
        floored[bins], capped[bins] = upper.mean(axis=0), lower.mean(axis=0)
        block_rows[bins] = np.median(cut.rows)
        deviation[bins] = np.max([weekly_deviation(each, cut, weeks) for each in (own, lower, upper)], axis=0)
    expected = Expected(
        share=share, floor=middle, floored=floored, cap=middle, capped=capped, rows=block_rows
    )
    replay = Replay(shares=taken, expected=expected, deviation=deviation, apart=_apart(column))
    return _Part(column=place, segment=segment, rows=len(inside), blocks=blocks, replay=replay)


def _quick(part: _Part, binned: Binned, inside: Array, cut: Cut) -> Iterator[_Part]:
    """The second series of a column with a long block, where the training rows are enough to show what its shares do
    within a day. A client that repeats a row may do so with any value: bets on a bin expect the largest deviation of a
    local mean that any of the bins had. Of numbers, whose bins are cumulated, a value above a bin's end is the same to
    it as one below, the other way round."""
    column = binned.column
    long = np.asarray([block != SHORTEST for block in part.blocks])
    if column.kind == "timestamp" or not long.any() or not shows_a_day(cut):
        return
    own = column.cumulated(cut.shares(binned.codes[inside], column.bins))
    if binned.fresh:
        own = _later_half(own, np.arange(column.bins), column.bins, cut)
    middle = np.median(own, axis=0)
    lower, upper = np.minimum(own, middle), np.maximum(own, middle)
    expected = Expected(
        share=own.mean(axis=0),
        floor=middle,
        floored=np.where(long, upper.mean(axis=0), 1.0),  # bins that have short blocks are not judged again
        cap=middle,
        capped=np.where(long, lower.mean(axis=0), 0.0),
        rows=np.full(column.bins, np.median(cut.rows)),
    )
    more = np.where(long, local_means(upper)[1] - upper.mean(axis=0), 0.0)
    less = np.where(long, lower.mean(axis=0) - local_means(lower)[0], 0.0)
    largest = more.max(), less.max()
    if column.kind == "number":
        largest = max(largest), max(largest)
    yield _Part(
        column=part.column,
        segment=part.segment,
        rows=part.rows,
        blocks=[SHORTEST] * column.bins,
        replay=Replay(
            shares=[(SHORTEST, np.arange(column.bins), own, cut.lasts)],
            expected=expected,
            deviation=(np.full(column.bins, largest[0]), np.full(column.bins, largest[1])),
            apart=_apart(column),
        ),
    )


def _apart(column: BinnedColumn) -> Array:
    """The bins that hold what training has hardly."""
    return np.arange(column.bins) >= column.bins - column.outside


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
    segments = np.bincount([part.column for part in parts if not part.quick], minlength=len(binned)) - 1
    twice = {(part.column, part.segment) for part in parts if part.quick}
    weights = []
    for part in parts:
        shared = segments[part.column]
        own = 1.0 if not shared else 0.5 if part.segment is None else 0.5 / shared
        halved = 0.5 if (part.column, part.segment) in twice else 1.0
        weights.append(float(of_column[part.column] * own * halved))
    return weights


def _kappas(parts: Sequence[_Part], weights: Sequence[float], spec: DriftSpec) -> list[float | None]:
    """One factor for all series, the largest that one of them needs; None where the spec names the tolerance. A quick
    series has its own."""
    found: list[float | None] = []
    for part, weight in zip(parts, weights, strict=True):
        check_stopped()
        named = spec.tolerance is not None and not part.quick
        found.append(None if named else smallest_kappa(part.replay, 1.0 / (weight * spec.false_alarms)))
    plain = [kappa for part, kappa in zip(parts, found, strict=True) if kappa and not part.quick]
    most = max(plain, default=None)
    return [kappa if part.quick else most for part, kappa in zip(parts, found, strict=True)]


def _series(part: _Part, weight: float, kappa: float | None, named: float | None) -> DriftSeries:
    """`named`: the tolerance of the spec."""
    expected, tolerance = part.replay.claim(kappa or 0.0)
    if named is not None:
        tolerance = np.full(len(tolerance), named)
    return DriftSeries(
        column=part.column,
        segment=part.segment,
        quick=part.quick,
        weight=weight,
        rows=part.rows,
        share=_rounded(expected.share),
        cap=_rounded(expected.cap),
        capped=_rounded(expected.capped),
        floor=_rounded(expected.floor),
        floored=_rounded(expected.floored),
        block_rows=_rounded(expected.rows),
        tolerance=_rounded(tolerance),
        block=tuple(part.blocks),
    )


def _rounded(values: Array) -> tuple[float, ...]:
    return tuple(round(float(value), 9) for value in values)
