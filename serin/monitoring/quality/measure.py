"""The live quality of one version: metrics of its labelled rows, by segment and day, and the estimate beside them; and
its quality objective: labels in the order of their arrival, in blocks, against the limit of its spec.

A block is a period of requests (`quality.json` says how long); rows inside it may depend on each other in any way. It
is judged when most of its labels have come: after the longest delay of nine in ten recent labels. A label that comes
after its block was judged counts in the oldest open block; a block of fewer than 16 rows is joined with the next. Each
label is used once: a correction changes what is shown and not the evidence. Assumed: how late a label comes says
nothing about how good the answer was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.scored import LOSS_OF_TASK, confidence, measured, reliability, row_loss
from serin.columns.segments import segment_masks
from serin.evidence.e_process import MeanEvidence
from serin.formats.quality import QualityReference
from serin.formats.reason import utc
from serin.formats.schema import Task
from serin.formats.serving.quality_evidence import QualityBlocks
from serin.formats.wire import wire_column
from serin.machine.typed_json import Document
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.quality.follow import QualityState
from serin.monitoring.quality.keys import RELEASE, TIME
from serin.monitoring.quality.scan import Watched
from serin.monitoring.quality.store import ARRIVED, LABEL, day_of
from serin.monitoring.quality.view import DayQuality, Estimated, Objective, ReleaseQuality, SegmentQuality
from serin.spec.monitoring import QualitySpec
from serin.store.artifacts import Release

BINS: Final = 512
_LARGEST: Final = 12.0  # log-odds
_SMALLEST: Final = float(np.finfo(np.float32).eps)


# A calibrated probability says how often it is right, so the scores alone give an expectation: accuracy, Brier score,
# log loss and AUC in a binary task, accuracy with several classes. Scores are calibrated by the reliability of the
# test rows. There is no such estimate for a regression or for several targets, and none sees a change in what follows
# from the same columns: it is an estimate, shown with its measured error once labels are there.
def count_scores(confidence: Array) -> dict[str, int]:
    """Scores as counts by place: equal steps of log-odds, fine enough for chances of any size."""
    chance = np.clip(confidence.astype(np.float64), 1e-9, 1 - 1e-9)
    odds = np.clip(np.log(chance / (1 - chance)), -_LARGEST, _LARGEST)
    place = np.minimum((odds + _LARGEST) / (2 * _LARGEST) * BINS, BINS - 1).astype(np.int64)
    kinds, counts = np.unique(place, return_counts=True)
    return {str(kind): int(count) for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)}


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {place: one.get(place, 0) + other.get(place, 0) for place in one.keys() | other.keys()}


def expected(
    task: Task, counts: Mapping[str, int], reliability: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The expected metrics of rows with these scores; empty for a task without an estimate, or without rows."""
    if task == "regression" or not counts:
        return {}
    places = np.array(sorted(int(place) for place in counts))
    rows = np.array([counts[str(place)] for place in places], np.float64)
    odds = (places + 0.5) / BINS * 2 * _LARGEST - _LARGEST
    score = 1 / (1 + np.exp(-odds))
    chance = _calibrated(score, reliability)
    if task == "multiclass":
        return {"accuracy": float(rows @ chance / rows.sum())}
    given = np.clip(score, _SMALLEST, 1 - _SMALLEST)
    each = {
        "logloss": -(chance * np.log(given) + (1 - chance) * np.log(1 - given)),
        "brier": chance * (1 - score) ** 2 + (1 - chance) * score**2,
        "accuracy": np.where(score > 0.5, chance, 1 - chance),
    }
    found = {name: float(rows @ values / rows.sum()) for name, values in each.items()}
    positive, negative = rows * chance, rows * (1 - chance)
    pairs = positive.sum() * negative.sum()
    if pairs:
        below = np.cumsum(negative) - negative
        found["auc"] = float(positive @ (below + negative / 2) / pairs)
    return found


def _calibrated(scores: Array, reliability: Sequence[Sequence[float]]) -> Array:
    """The rates that belong to scores, by the bins of the test rows made monotonic (pool adjacent violators)."""
    if not reliability:
        return scores
    pools: list[list[float]] = []  # rate, rows, first score, last score
    for score, rate, rows in reliability:
        pools.append([rate, rows, score, score])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            rate, rows, _, last = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + rate * rows) / (before[1] + rows)
            before[1], before[3] = before[1] + rows, last
    known = [(score, pool[0]) for pool in pools for score in dict.fromkeys((pool[2], pool[3]))]
    return np.interp(scores, [score for score, _ in known], [rate for _, rate in known])


Array = npt.NDArray[Any]

MOST_ROWS = 2_000_000
_DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Labelled rows as arrays, of the rows whose truth this version knows."""

    truth: Array
    scores: Array
    loss: Array
    t: Array  # microseconds since 1970
    arrived: Array
    known: Array  # which rows of the table these are

    def __len__(self) -> int:
        return len(self.truth)


def count_recorded(watched: Watched, rows: pa.Table, state: QualityState) -> None:
    """Counts newly recorded rows by day, and their scores for the estimate."""
    days = np.asarray(rows.column(TIME).cast(pa.int64()), np.int64) // _DAY_US
    version = str(watched.version)
    recorded, scores = state.recorded.setdefault(version, {}), state.scores.setdefault(version, {})
    given = None
    if (
        watched.schema.task != "regression"
        and not watched.schema.targets
        and watched.answer in rows.column_names
    ):
        given = confidence(watched.schema.task, None, answers(rows, watched))[0]
    for number in np.unique(days).tolist():
        inside, day = days == number, day_of(number * 86_400)
        recorded[day] = recorded.get(day, 0) + int(np.count_nonzero(inside))
        if given is not None:
            own = given[inside]
            scores[day] = add_counts(scores.get(day, {}), count_scores(own[~np.isnan(own)]))


def answers(rows: pa.Table, watched: Watched) -> Array:
    """The scores of recorded rows, [rows], or [rows, n] for several targets or classes."""
    values = rows.column(watched.answer).combine_chunks()
    if pa.types.is_nested(values.type):  # a list for each row
        return np.asarray(values.flatten(), np.float32).reshape(len(values), -1)
    return np.asarray(values.fill_null(np.nan), np.float32)


def scored(rows: pa.Table, watched: Watched, reference: QualityReference | None) -> Scored:
    """Labelled rows as arrays. A class that the version does not know, or a row without a score, is left out."""
    schema, scores = watched.schema, answers(rows, watched)
    truth: Array
    if schema.task == "multiclass":
        places = {name: place for place, name in enumerate(schema.classes or ())}
        truth = np.array([places.get(name, -1) for name in rows.column(LABEL).to_pylist()], np.int64)
        known = truth >= 0
    elif schema.targets:
        truth = np.asarray(rows.column(LABEL).combine_chunks().flatten(), np.float64).reshape(len(rows), -1)
        known = np.ones(len(truth), bool)
    else:
        truth = np.asarray(rows.column(LABEL), np.float64)
        known = np.ones(len(truth), bool)
    known &= ~np.isnan(scores.reshape(len(scores), -1)).any(axis=1)
    scale, clip = (reference.scale, reference.clip) if reference else (1.0, np.inf)
    t, arrived = (np.asarray(rows.column(name).cast(pa.int64()), np.int64) for name in (TIME, ARRIVED))
    loss = row_loss(schema.task, truth[known], scores[known], scale=scale, clip=clip)
    return Scored(
        truth=truth[known], scores=scores[known], loss=loss, t=t[known], arrived=arrived[known], known=known
    )


def measure_release(
    model: str,
    watched: Watched,
    reference: QualityReference | None,
    rows: pa.Table | None,
    state: QualityState,
    objective: Objective | None,
) -> ReleaseQuality:
    """`rows`: the labelled ones; None when there are none."""
    schema, version = watched.schema, str(watched.version)
    by_day = state.recorded.get(version, {})
    recorded = sum(by_day.values())
    counts: dict[str, int] = {}
    for each in state.scores.get(version, {}).values():
        counts = add_counts(counts, each)
    offline = reference.metrics if reference else {}
    bins = reference.reliability if reference else ()
    known = None if rows is None else scored(rows, watched, reference)
    metrics = measured(schema.task, known.truth, known.scores, schema.targets) if known else {}
    labelled = 0 if known is None else len(known)
    return ReleaseQuality(
        version=watched.version,
        release=Release(model=model, version=watched.version).name,
        task=schema.task,
        recorded=recorded,
        labelled=labelled,
        coverage=labelled / recorded if recorded else None,
        delay_s=_delay(known) if known else None,
        measured_on=labelled,
        loss_name=LOSS_OF_TASK[schema.task],
        metrics=metrics,
        offline=offline,
        estimate=_estimates(
            watched, counts, bins, known, {name: each.value for name, each in metrics.items()}
        ),
        reliability=tuple(
            (b.score, b.rate, b.rows) for b in reliability(schema.task, known.truth, known.scores, 10)
        )
        if known
        else (),
        segments=_segments(watched, reference, rows, known) if rows is not None and known else (),
        days=_days(by_day, known),
        objective=objective,
    )


def _delay(known: Scored) -> tuple[float, float] | None:
    if not len(known):
        return None
    middle, long = np.quantile((known.arrived - known.t) / 1e6, (0.5, 0.9))
    return float(middle), float(long)


def _estimates(
    watched: Watched, counts: dict[str, int], bins: Any, known: Scored | None, metrics: dict[str, float]
) -> dict[str, Estimated]:
    task = watched.schema.task
    if task == "regression" or watched.schema.targets:
        return {}
    again: dict[str, float] = {}
    if known is not None and len(known):
        again = expected(task, count_scores(confidence(task, None, known.scores)[0]), bins)
    found = {}
    for name, value in expected(task, counts, bins).items():
        there = again.get(name) if name in metrics else None
        error = None if there is None else there - metrics[name]
        found[name] = Estimated(value=value, labelled=there, error=error)
    return found


def _editions(rows: pa.Table, places: pa.Array) -> dict[str, pa.Array]:
    """The release of each row, which shows the edition of the lookups; nothing if there is one."""
    column = rows.column(RELEASE).take(places).cast(pa.string())
    names = pc.replace_substring_regex(column, pattern="-baseline$", replacement="").combine_chunks()
    return {RELEASE: names} if pc.count_distinct(names).as_py() > 1 else {}


def _segments(
    watched: Watched, reference: QualityReference | None, rows: pa.Table, known: Scored
) -> tuple[SegmentQuality, ...]:
    inputs = {column.name: column for column in watched.schema.inputs}
    places = pa.array(np.flatnonzero(known.known))
    wire = _editions(rows, places) | {
        name: pa.array(wire_column(rows.column(column).take(places), inputs[name]).reshape(-1))
        for name, column in watched.segment_columns.items()
        if column in rows.column_names
    }
    found = []
    for name, mask in segment_masks(pa.table(wire), list(wire)).items():
        found.append(
            SegmentQuality(
                name=name,
                rows=int(np.count_nonzero(mask)),
                metrics=measured(
                    watched.schema.task, known.truth[mask], known.scores[mask], watched.schema.targets
                ),
                offline=reference.segments.get(name, {}) if reference else {},
                loss=float(known.loss[mask].mean()),
            )
        )
    return tuple(found)


def _days(recorded: dict[str, int], known: Scored | None) -> tuple[DayQuality, ...]:
    labelled: dict[str, tuple[int, float]] = {}
    if known is not None and len(known):
        days, codes = np.unique(known.t // _DAY_US, return_inverse=True)
        rows, loss = np.bincount(codes), np.bincount(codes, known.loss)
        for number, count, total in zip(days.tolist(), rows.tolist(), loss.tolist(), strict=True):
            labelled[day_of(number * 86_400)] = count, total / count
    return tuple(
        DayQuality(
            day=day,
            recorded=recorded.get(day, 0),
            labelled=labelled.get(day, (0, 0.0))[0],
            loss=labelled[day][1] if day in labelled else None,
        )
        for day in sorted(recorded.keys() | labelled.keys())
    )


FEWEST_ROWS: Final = 16

_YEAR_S: Final = 365 * 86_400.0
_KEPT_BLOCKS: Final = 2000  # for the controller: more than a rollout has
_LATE: Final = 0.9
_FADES: Final = 0.9  # what is left of the longest delay after another batch of labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a release is held to."""

    reference: QualityReference
    spec: QualitySpec

    @property
    def limit(self) -> float:
        return self.reference.loss + self.spec.margin

    @property
    def threshold(self) -> float:
        """The evidence for an alarm: then false ones are as rare as the spec says."""
        return _YEAR_S / self.reference.block_s / self.spec.false_alarms


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveState(Document):
    """`open`: rows and sum of losses by period. `judged`: the last period that was. `delay_s`: how long most labels
    take. `used` and `total`: all labels so far and the sum of their losses."""

    open: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    judged: int | None = None
    delay_s: float = 0.0
    evidence: MeanEvidence = field(default_factory=MeanEvidence)
    alarm: bool = False
    count: int = 0
    used: int = 0
    total: float = 0.0
    blocks: tuple[tuple[float, float, int], ...] = ()


def take_labels(state: ObjectiveState, rows: Scored, watch: Watch) -> ObjectiveState:
    """Puts rows that have just got their first label into their blocks."""
    if not len(rows):
        return state
    period = np.floor(rows.t / 1e6 / watch.reference.block_s).astype(np.int64)
    if state.judged is not None:
        first = min((each for each in state.open if each > state.judged), default=state.judged + 1)
        period = np.where(period <= state.judged, first, period)
    blocks = dict(state.open)
    for number in np.unique(period).tolist():
        inside = period == number
        had, total = blocks.get(number, (0, 0.0))
        blocks[number] = had + int(np.count_nonzero(inside)), total + float(rows.loss[inside].sum())
    late = float(np.quantile((rows.arrived - rows.t) / 1e6, _LATE))
    return replace(
        state,
        open=blocks,
        delay_s=max(late, _FADES * state.delay_s),
        used=state.used + len(rows),
        total=state.total + float(rows.loss.sum()),
    )


def judge_blocks(state: ObjectiveState, watch: Watch, now: float) -> ObjectiveState:
    """Bets on every block whose labels have come by `now`, the oldest first."""
    size = watch.reference.block_s
    while state.open:
        period = min(state.open)
        if now < (period + 1) * size + state.delay_s:
            break
        rows, total = state.open[period]
        rest = {each: block for each, block in state.open.items() if each != period}
        if rows < FEWEST_ROWS:
            if not rest:
                break  # it waits for more, or for a later block to join
            then = min(rest)
            had, before = rest[then]
            state = replace(state, open={**rest, then: (had + rows, before + total)}, judged=period)
            continue
        state = _judge(replace(state, open=rest, judged=period), watch, period * size, total / rows, rows)
    return state


def _judge(state: ObjectiveState, watch: Watch, began: float, mean: float, rows: int) -> ObjectiveState:
    evidence = state.evidence.add(
        began=began, mean=mean, rows=rows, limit=watch.limit, most=10 * watch.threshold
    )
    alarm = state.alarm
    if not alarm and evidence.value >= watch.threshold:
        alarm = True
    elif alarm and evidence.run <= 0:  # the loss has come back within the limit
        alarm, evidence = False, MeanEvidence()
    blocks = (*state.blocks, (began + watch.reference.block_s, mean, rows))[-_KEPT_BLOCKS:]
    return replace(state, evidence=evidence, alarm=alarm, count=state.count + 1, blocks=blocks)


def objective_of(state: ObjectiveState, watch: Watch) -> Objective:
    """The state as it is shown."""
    return Objective(
        loss_name=watch.reference.loss_name,
        offline=watch.reference.loss,
        limit=watch.limit,
        mean=state.total / state.used if state.used else None,
        evidence=state.evidence.value,
        threshold=watch.threshold,
        blocks=state.count,
        used=state.used,
        alarm=state.alarm,
        since=state.evidence.since if state.alarm else None,
        block_s=watch.reference.block_s,
        judged=(min(state.open) + 1) * watch.reference.block_s + state.delay_s if state.open else None,
    )


def blocks_of(state: ObjectiveState, watch: Watch) -> QualityBlocks:
    """The state as the controller needs it."""
    return QualityBlocks(
        loss_name=watch.reference.loss_name,
        offline=watch.reference.loss,
        limit=watch.limit,
        blocks=state.blocks,
    )


def quality_alert(
    model: str, release: str, objective: Objective, recent: float | None, *, rollback: str
) -> Alert:
    """`recent`: the mean loss since the excess began. `rollback`: what is done about it; empty: nothing."""
    since = objective.since or 0.0
    mean = objective.mean if recent is None else recent
    found = "" if mean is None else f" is {mean:.4g} since {utc(since)},"
    text = (
        f"the mean {objective.loss_name} of {release}{found} at most {objective.limit:.4g} is allowed "
        f"({objective.offline:.4g} on the test rows); {objective.used:,} labels were used"
    )
    return Alert(
        key=alert_key(model),
        kind="quality",
        model=model,
        release=release,
        severity="page",
        title=f"{release} is worse than its quality objective allows",
        text=f"{text}; {rollback}" if rollback else text,
        since=since,
        facts={**asdict(objective), "mean_since": recent, "rollback": rollback},
    )


def alert_key(model: str) -> str:
    return f"{model}/quality"
