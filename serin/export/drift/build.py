"""Makes the drift statistics of a version that is being exported, from its training rows and its own scores on them.

The training rows are read and joined once more, at most half a million of them, and scored for at most about a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from serin.columns.bins import count_rows
from serin.columns.column import Array
from serin.errors import ExportFailed, SpecError
from serin.evidence.e_detector import Expected
from serin.export.champion import ReadRows
from serin.export.drift.choose_bins import Binned, Source, bin_column
from serin.export.drift.training_blocks import (
    DAY_SEEN_S,
    SAFETY,
    WEEK_S,
    Cut,
    Replay,
    blocks_of,
    choose_block,
    cut_evenly,
    cut_time,
    local_means,
    longer,
    smallest_kappa,
    weekly_deviation,
)
from serin.formats.bundle import output_column
from serin.formats.drift import BLOCK_S, SHORTEST, BinnedColumn, Block, DriftSeries, DriftStatistics, Segment
from serin.formats.importance import Importance
from serin.formats.schema import OutputTensor, Schema
from serin.formats.wire import TrainingRows
from serin.machine.stopping import check_stopped
from serin.spec.monitoring import FEWEST_WEEKS, DriftSpec, weeks_problem
from serin.spec.pipeline import PipelineSpec

logger = logging.getLogger(__name__)


_SEGMENTS = 8  # values of a column in `export.segments` that are watched separately, the most frequent
_PARTS = 8  # of a table without a time, in which values may be new
_SEGMENT_SHARE, _SEGMENT_ROWS = 0.02, 1000  # that such a value must have, of all rows and at least
_ROWS = 500_000
_FEWEST_ROWS = 50_000  # scored however long it takes
_SCORE_SECONDS = 60.0
_TEST_ROWS = 50_000
_TRIAL_ROWS = 2048
_COMPARABLE_ROWS = 200  # of a segment, among the test rows
_CLASSES = 10  # a model with more classes is watched by its label alone
Score = Callable[[pa.Table], Mapping[str, Array]]
ReadTraining = Callable[[int], TrainingRows]
"""At most so many training rows."""


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
        cuts: dict[Block, Cut] = {SHORTEST: cut_evenly(len(inside))}
        if times is not None:
            cuts = {name: cut_time(times[inside], name, float(times[0])) for name in BLOCK_S}
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
    if column.kind == "timestamp" or not long.any() or float(np.median(cut.lasts)) > DAY_SEEN_S:
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


def version_statistics(
    spec: PipelineSpec,
    schema: Schema,
    score: Score,
    importance: Importance | None,
    read: ReadTraining | None,
    read_rows: ReadRows | None,
) -> DriftStatistics | None:
    """The statistics; None when the spec does not watch drift. SpecError when the training period is too short to
    take tolerances from."""
    drift = spec.monitoring.drift
    if drift is None:
        return None
    if read is None or read_rows is None:
        raise ExportFailed(
            what="drift.json", reason="monitoring.drift needs rows of the tables, which are not available"
        )
    begun = time.monotonic()
    rows = read(_ROWS)
    problem = weeks_problem(complete_weeks(rows)) if drift.tolerance is None else None
    if problem is not None:
        raise SpecError(where=spec.name, problems=[problem])
    rows = rows.thinned(_step(rows, score))
    losses = {} if importance is None else {each.column: each.loss for each in importance.columns}
    found = make_statistics(
        replace(rows, table=_with_scores(rows.table, schema, score)),
        [*_requests(spec, schema), *_scores(schema)],
        segments=spec.export.segments,
        spec=drift,
        importance=losses,
    )
    found = cover_test_scores(found, _with_scores(read_rows(spec.features, _TEST_ROWS).table, schema, score))
    logger.info(
        f"drift statistics of {len(found.columns)} columns from {len(rows):,} of {rows.total:,} training rows in "
        f"{time.monotonic() - begun:.0f} s"
    )
    return found


def reference_statistics(spec: PipelineSpec, schema: Schema, rows: TrainingRows) -> DriftStatistics:
    """The statistics of rows that were not trained on here, with the answers that they have got. Columns that hold
    several values in a row are not watched. SpecError when the period is too short to take tolerances from."""
    drift = spec.monitoring.drift
    assert drift is not None
    if drift.tolerance is None and (problem := weeks_problem(complete_weeks(rows))) is not None:
        raise SpecError(where=spec.name, problems=[problem])
    sources = [
        each for each in (*_requests(spec, schema), *_scores(schema)) if each.field in rows.table.column_names
    ]
    return make_statistics(rows, sources, segments=spec.export.segments, spec=drift, importance={})


def cover_test_scores(statistics: DriftStatistics, test: pa.Table) -> DriftStatistics:
    """The statistics with tolerances of scores that cover the difference between training rows and test rows: a model
    scores the rows that it was trained on differently."""
    counts = count_rows(statistics, test, np.zeros(len(test))).counts[0]
    ends = np.cumsum([len(each.share) for each in statistics.series])
    series = [
        _covering(each, own) if statistics.columns[each.column].source == "score" else each
        for each, own in zip(statistics.series, np.split(counts, ends[:-1]), strict=True)
    ]
    return replace(statistics, series=tuple(series))


def _covering(series: DriftSeries, counts: Array) -> DriftSeries:
    if counts.sum() < _COMPARABLE_ROWS:
        return series
    gap = SAFETY * np.abs(counts / counts.sum() - np.asarray(series.share))
    return replace(series, tolerance=tuple(np.maximum(series.tolerance, np.minimum(gap, 1.0)).tolist()))


def _with_scores(table: pa.Table, schema: Schema, score: Score) -> pa.Table:
    scored = score(table)
    for output in schema.outputs:
        flat = scored[output.name].reshape(len(table), -1)
        table = table.append_column(_field(output), output_column(flat))
    return table


def _step(rows: TrainingRows, score: Score) -> int:
    """Every how many rows are scored, a power of two."""
    trial = rows.table.slice(0, _TRIAL_ROWS)
    score(trial)  # the first run allocates
    begun = time.monotonic()
    score(trial)
    seconds = (time.monotonic() - begun) * len(rows) / max(len(trial), 1)
    step = 1
    while seconds / step > _SCORE_SECONDS and len(rows) // (2 * step) >= _FEWEST_ROWS:
        step *= 2
    return step


def _requests(spec: PipelineSpec, schema: Schema) -> Iterator[Source]:
    """The request columns that are recorded, as far as the spec wants them watched, and the segments."""
    drift, capture = spec.monitoring.drift, spec.monitoring.capture
    assert drift is not None
    wanted = None if drift.columns is None else {*drift.columns, *spec.export.segments}
    for column in schema.inputs:
        hidden = column.name in capture.mask or column.name in capture.drop
        if not hidden and (wanted is None or column.name in wanted):
            yield Source(name=column.name, field=column.name, source="request")


def _scores(schema: Schema) -> Iterator[Source]:
    for output in schema.outputs:
        wide = int(np.prod(output.dims))
        if wide == 1:
            yield Source(name=output.name, field=_field(output), source="score")
        elif schema.task != "multiclass" or wide <= _CLASSES:
            names = schema.classes or schema.targets or tuple(map(str, range(wide)))
            for place, name in enumerate(names):
                yield Source(
                    name=f"{output.name}[{name}]", field=_field(output), source="score", element=place
                )


def _field(output: OutputTensor) -> str:
    """The name of an answer in captured rows."""
    return f"_answer_{output.name}"
