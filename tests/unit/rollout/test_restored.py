"""A rollout whose processes are all gone is held before it loads, or completed when it had decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serin.rollout.decide.advance import Seen, advance
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.restored import restored
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.store.artifacts import Release

OLD, NEW = Release(model="churn", version=1), Release(model="churn", version=2)
GONE = Seen(candidate="absent", stable_ready=False)


def rollout(phase: Phase, step: int | None = 1) -> Rollout:
    return Rollout(
        id="r", candidate=NEW, stable=OLD, previous=None, plan=Plan(), phase=phase, step=step, epoch=7,
        began=1.0, since=2.0, evidence_from=2.0, reason="as it was",
    )  # fmt: skip


@pytest.mark.parametrize(
    "phase",
    [Phase.PENDING, Phase.LOADING, Phase.VERIFYING, Phase.SHADOWING, Phase.SHIFTING, Phase.WITHDRAWING,
     Phase.RESTARTING, Phase.BAKING],
)  # fmt: skip
def test_an_open_one_is_held_and_the_live_release_has_all_traffic(phase: Phase) -> None:
    then = restored(rollout(phase), 9.0, "restored", by="ada")
    assert (then.phase, then.hold, then.weight_percent, then.live) == (Phase.PENDING, Hold.PAUSED, 0.0, OLD)
    assert then.route is not None
    assert (then.route.stable, then.route.candidate) == (OLD, None)
    assert advance(then, GONE, 10.0) == then  # whatever is missing, it waits for a person


def test_a_resumed_one_loads_and_returns_to_its_step() -> None:
    held = restored(rollout(Phase.SHIFTING, step=2), 9.0, "restored", by="ada")
    now = advance(_resumed(held), GONE, 10.0)
    assert now.phase is Phase.LOADING
    now = advance(advance(now, Seen(), 11.0), Seen(verified=True), 12.0)
    assert (now.phase, now.step, now.evidence) == (Phase.SHIFTING, 2, {})
    assert now.epoch > 7
    assert now.evidence_epoch == now.epoch


@pytest.mark.parametrize(
    ("phase", "end", "live"),
    [
        (Phase.DRAINING, Phase.PROMOTED, NEW),
        (Phase.ABORTING, Phase.ROLLED_BACK, OLD),
        (Phase.RETIRING, Phase.RETIRED, None),
    ],
)
def test_one_that_had_decided_is_completed(phase: Phase, end: Phase, live: Release | None) -> None:
    before = rollout(phase)
    if phase is Phase.RETIRING:
        before = Rollout(
            id="r", candidate=OLD, stable=None, previous=None, plan=Plan(), phase=phase, began=1.0, since=2.0,
            evidence_from=2.0,
        )  # fmt: skip
    then = restored(before, 9.0, "restored", by="ada")
    assert (then.phase, then.live, then.hold) == (end, live, None)


@pytest.mark.parametrize("phase", [Phase.PROMOTED, Phase.ROLLED_BACK, Phase.RETIRED])
def test_one_that_had_ended_stays(phase: Phase) -> None:
    assert restored(rollout(phase), 9.0, "restored", by="ada") == rollout(phase)


def _resumed(held: Rollout) -> Rollout:
    return replace(held, hold=None)
