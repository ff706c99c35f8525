"""The quality objective of a release: labels in the order of their arrival, in blocks, against the limit of its spec.

A block is a period of requests (`quality.json` says how long); rows inside it may depend on each other in any way. It
is judged when most of its labels have come: after the longest delay of nine in ten recent labels. A label that comes
after its block was judged counts in the oldest open block; a block of fewer than 16 rows is joined with the next. Each
label is used once: a correction changes what is shown and not the evidence. Assumed: how late a label comes says
nothing about how good the answer was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Final

import numpy as np

from serin.evidence.e_process import MeanEvidence
from serin.formats.quality import QualityReference
from serin.formats.reason import utc
from serin.formats.serving.quality_evidence import QualityBlocks
from serin.machine.typed_json import Document, Stored
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.quality.measure import Scored
from serin.monitoring.quality.view import Objective
from serin.spec.monitoring import QualitySpec

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


def _json2open(rows: Sequence[tuple[int, int, float]]) -> dict[int, tuple[int, float]]:
    return {int(period): (int(count), float(total)) for period, count, total in rows}


def _open2json(blocks: Mapping[int, tuple[int, float]]) -> list[list[float]]:
    return [[period, *block] for period, block in sorted(blocks.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveState(Document):
    """`open`: rows and sum of losses by period. `judged`: the last period that was. `delay_s`: how long most labels
    take. `used` and `total`: all labels so far and the sum of their losses."""

    open: Annotated[Mapping[int, tuple[int, float]], Stored(_json2open, _open2json)] = field(
        default_factory=dict
    )
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
