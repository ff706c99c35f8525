"""The quality objective: how rarely it is wrong, how fast it is right, and what late labels do."""

import json
from dataclasses import replace

import numpy as np
import pytest

from serin.evidence.e_process import MeanEvidence
from serin.formats.quality import QualityReference
from serin.monitoring.quality.measure import (
    ObjectiveState,
    Scored,
    Watch,
    judge_blocks,
    objective_of,
    take_labels,
)
from serin.spec.monitoring import QualitySpec

DAY_S = 86_400.0
WATCH = Watch(
    reference=QualityReference(
        rows=1000, loss_name="brier", loss=0.15, scale=1.0, clip=1.0, block_s=DAY_S, metrics={}
    ),
    spec=QualitySpec(margin=0.02, false_alarms=1.0),
)


def labelled(day: float, losses: np.ndarray, *, delay_s: float = 0.0) -> Scored:
    """Rows of a day, whose labels come so late."""
    t = ((day + np.linspace(0, 0.9, len(losses))) * DAY_S * 1e6).astype(np.int64)
    rows = np.zeros(len(losses))
    return Scored(
        truth=rows,
        scores=rows,
        loss=losses,
        t=t,
        arrived=t + int(delay_s * 1e6),
        known=np.ones(len(losses), bool),
    )


def run(state: ObjectiveState, days: range, losses: list[np.ndarray]) -> ObjectiveState:
    for day, each in zip(days, losses, strict=True):
        state = judge_blocks(take_labels(state, labelled(day, each), WATCH), WATCH, (day + 1) * DAY_S + 1)
    return state


@pytest.mark.parametrize("alike", [False, True])
def test_false_alarms_are_no_more_frequent_than_the_spec_says(alike: bool) -> None:
    """At the limit exactly, in 150 years; also when all rows of a day go wrong together."""
    random, alarms = np.random.default_rng(1), 0
    days = 150 * 365
    if alike:
        means = (random.random(days) < WATCH.limit).astype(np.float64)
    else:
        means = random.binomial(50, WATCH.limit, days) / 50
    log_m = MeanEvidence()
    for mean in means:
        log_m = log_m.add(began=0.0, mean=float(mean), rows=50, limit=WATCH.limit, most=10 * WATCH.threshold)
        if log_m.value >= WATCH.threshold:
            alarms, log_m = alarms + 1, MeanEvidence()
    assert alarms <= 150, alarms
    assert alarms > 5  # the promise is kept, and not by never looking


def test_a_version_that_becomes_worse_is_found_and_since_when_is_told() -> None:
    random = np.random.default_rng(2)
    good = [random.binomial(1, 0.15, 200).astype(float) for _ in range(100)]
    bad = [random.binomial(1, 0.30, 200).astype(float) for _ in range(20)]
    state = run(ObjectiveState(), range(100), good)
    assert not state.alarm
    found = 0
    for day, losses in enumerate(bad, 100):
        state = run(state, range(day, day + 1), [losses])
        found += not state.alarm
    told = objective_of(state, WATCH)
    assert state.alarm
    assert found < 12
    assert told.since is not None
    assert abs(told.since / DAY_S - 100) <= 2
    assert state.evidence.mean == pytest.approx(0.30, abs=0.03)
    again = run(state, range(120, 220), [random.binomial(1, 0.1, 200).astype(float) for _ in range(100)])
    assert not again.alarm  # it has come back within the limit


def test_a_loss_within_the_margin_never_becomes_an_alarm_however_much_data_there_is() -> None:
    random = np.random.default_rng(3)
    for _ in range(5):
        losses = [
            random.normal(0.165, 0.0005, 100) for _ in range(365)
        ]  # thousands of rows would give such means
        assert not run(ObjectiveState(), range(365), losses).alarm


def test_a_block_waits_for_its_labels_and_late_ones_count_in_the_oldest_open_block() -> None:
    day = labelled(0, np.full(20, 0.1), delay_s=2 * DAY_S)
    state = take_labels(ObjectiveState(), day, WATCH)
    assert judge_blocks(state, WATCH, 2.5 * DAY_S).count == 0  # nine in ten labels take two days
    state = judge_blocks(state, WATCH, 3.1 * DAY_S)
    assert (state.count, state.judged) == (1, 0)
    state = take_labels(state, labelled(2, np.full(20, 0.1), delay_s=DAY_S), WATCH)
    state = take_labels(state, labelled(0, np.full(5, 0.9), delay_s=4 * DAY_S), WATCH)
    assert dict(state.open) == {2: (25, pytest.approx(6.5))}
    assert state.used == 45


def test_a_block_of_few_rows_is_joined_with_the_next() -> None:
    state = take_labels(ObjectiveState(), labelled(0, np.full(3, 0.5)), WATCH)
    state = judge_blocks(state, WATCH, 5 * DAY_S)
    assert (state.count, state.judged) == (0, None)  # it waits
    state = take_labels(state, labelled(6, np.full(20, 0.1)), WATCH)
    state = judge_blocks(state, WATCH, 8 * DAY_S)
    assert (state.count, dict(state.open)) == (1, {})
    assert state.blocks == ((7 * DAY_S, pytest.approx((1.5 + 2.0) / 23), 23),)


def test_a_backlog_of_labels_is_judged_in_blocks_of_its_own_time() -> None:
    state = ObjectiveState()
    for day in (2, 0, 1):
        state = take_labels(state, labelled(day, np.full(20, day / 10)), WATCH)
    state = judge_blocks(state, WATCH, 30 * DAY_S)
    assert [(ended / DAY_S, mean) for ended, mean, _ in state.blocks] == [
        (1, 0.0), (2, pytest.approx(0.1)), (3, pytest.approx(0.2)),
    ]  # fmt: skip


def test_the_state_continues_exactly_from_its_json() -> None:
    random = np.random.default_rng(4)
    losses = [random.random(30) * 0.4 for _ in range(40)]
    whole = run(ObjectiveState(), range(40), losses)
    state = ObjectiveState()
    for day, each in enumerate(losses):
        state = ObjectiveState.from_json(json.loads(json.dumps(state.to_json())))
        state = run(state, range(day, day + 1), [each])
    assert state.to_json() == whole.to_json()


def test_rarer_false_alarms_and_shorter_blocks_need_more_evidence() -> None:
    rarer = replace(WATCH, spec=QualitySpec(margin=0.02, false_alarms=0.1))
    minutes = replace(WATCH, reference=replace(WATCH.reference, block_s=60.0))
    assert (WATCH.threshold, rarer.threshold, minutes.threshold) == (365.0, 3650.0, 525_600.0)
