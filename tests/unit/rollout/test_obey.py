from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serin.errors import RolloutRefused
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Command, Kind
from serin.store.artifacts import Release

V1, V2, V3 = (Release(model="flights", version=n) for n in (1, 2, 3))
PLAN = Plan(steps=(5.0, 50.0, 100.0))
T = 1000.0


def rollout(phase: Phase, **changes: Any) -> Rollout:
    routed = phase in (Phase.SHIFTING, Phase.BAKING, Phase.DRAINING)
    fields: dict[str, Any] = {
        "id": "r1",
        "candidate": V2,
        "stable": V1,
        "previous": None,
        "plan": PLAN,
        "phase": phase,
        "step": {Phase.SHIFTING: 0, Phase.BAKING: 2, Phase.DRAINING: 2}.get(phase) if routed else None,
        "epoch": 7,
        "began": T - 10,
        "since": T - 10,
        "evidence_from": T - 10,
    }
    return Rollout(**(fields | changes))


def command(kind: Kind, **changes: Any) -> Command:
    return Command(**({"kind": kind, "model": "flights", "by": "ann", "id": "c1"} | changes))


RUNNING = [phase for phase in Phase if not phase.final]
CHANGEABLE = [phase for phase in RUNNING if phase not in (Phase.ABORTING, Phase.RETIRING)]


def test_the_first_start_has_no_stable_release() -> None:
    then = apply_command(None, command("start", version=2, plan=PLAN), T)
    assert (then.id, then.phase, then.stable, then.candidate, then.by) == (
        "c1",
        Phase.PENDING,
        None,
        V2,
        "ann",
    )


def test_a_start_after_a_promotion_takes_the_promoted_release_as_stable() -> None:
    then = apply_command(rollout(Phase.PROMOTED), command("start", version=3), T)
    assert (then.stable, then.candidate, then.previous, then.epoch) == (V2, V3, V1, 7)


def test_a_start_after_a_rollback_may_try_the_same_version_again() -> None:
    then = apply_command(rollout(Phase.ROLLED_BACK), command("start", version=2), T)
    assert (then.stable, then.candidate) == (V1, V2)


@pytest.mark.parametrize("phase", RUNNING)
def test_a_second_rollout_is_refused_while_one_runs(phase: Phase) -> None:
    with pytest.raises(RolloutRefused, match=f"version 2 is {phase}"):
        apply_command(rollout(phase), command("start", version=3), T)


def test_the_live_version_is_refused_as_a_candidate() -> None:
    with pytest.raises(RolloutRefused, match="version 2 is live already"):
        apply_command(rollout(Phase.PROMOTED), command("start", version=2), T)


def test_a_start_without_a_version_is_refused() -> None:
    with pytest.raises(RolloutRefused, match="name the version"):
        apply_command(None, command("start"), T)


@pytest.mark.parametrize("phase", [None, Phase.PROMOTED, Phase.ROLLED_BACK])
@pytest.mark.parametrize("kind", ["pause", "resume", "approve", "promote", "abort"])
def test_a_rollout_that_does_not_run_cannot_be_changed(phase: Phase | None, kind: Kind) -> None:
    with pytest.raises(RolloutRefused, match="no rollout is running"):
        apply_command(rollout(phase) if phase else None, command(kind), T)


@pytest.mark.parametrize("kind", ["pause", "resume", "approve", "promote", "abort", "rollback"])
def test_a_running_rollback_is_not_disturbed(kind: Kind) -> None:
    with pytest.raises(RolloutRefused, match="being rolled back"):
        apply_command(rollout(Phase.ABORTING), command(kind), T)


@pytest.mark.parametrize("phase", CHANGEABLE)
@pytest.mark.parametrize("kind", ["abort", "rollback"])
def test_abort_and_back_take_all_traffic_away_in_every_phase(phase: Phase, kind: Kind) -> None:
    then = apply_command(rollout(phase), command(kind, why="too slow"), T)
    assert (then.phase, then.weight_percent, then.by) == (Phase.ABORTING, 0, "ann")
    assert then.reason == f"{kind} by ann: too slow"


@pytest.mark.parametrize("phase", CHANGEABLE)
def test_pause_and_resume_work_in_every_phase(phase: Phase) -> None:
    now = rollout(phase)
    paused = apply_command(now, command("pause"), T)
    resumed = apply_command(paused, command("resume"), T)
    assert (paused.hold, paused.route) == (Hold.PAUSED, now.route)
    assert (resumed.hold, resumed.phase, resumed.since, resumed.epoch) == (None, phase, now.since, now.epoch)


@pytest.mark.parametrize("hold", [Hold.FAILED, Hold.INCONCLUSIVE, Hold.INVALID, Hold.NO_TRAFFIC])
def test_resume_from_a_verdict_begins_the_step_again(hold: Hold) -> None:
    then = apply_command(rollout(Phase.SHIFTING, hold=hold), command("resume"), T)
    assert (then.hold, then.step, then.since, then.evidence_from, then.epoch) == (None, 0, T, T, 8)


def test_what_is_not_held_cannot_be_resumed_and_what_is_paused_not_paused() -> None:
    with pytest.raises(RolloutRefused, match="not held"):
        apply_command(rollout(Phase.SHIFTING), command("resume"), T)
    with pytest.raises(RolloutRefused, match="paused already"):
        apply_command(rollout(Phase.SHIFTING, hold=Hold.PAUSED), command("pause"), T)


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.LOADING, Phase.VERIFYING])
def test_promote_never_goes_past_the_golden_rows(phase: Phase) -> None:
    then = apply_command(rollout(phase), command("promote"), T)
    assert (then.phase, then.plan.steps, then.weight_percent) == (phase, (100.0,), 0)


@pytest.mark.parametrize("hold", [None, Hold.PAUSED, Hold.INCONCLUSIVE])
def test_promote_gives_a_shifting_candidate_all_traffic(hold: Hold | None) -> None:
    then = apply_command(rollout(Phase.SHIFTING, hold=hold), command("promote"), T)
    assert (then.phase, then.weight_percent, then.hold) == (Phase.BAKING, 100, None)
    assert then.plan.min_requests == 0, "nobody's traffic is waited for"


def test_promote_ends_a_bake() -> None:
    assert apply_command(rollout(Phase.BAKING), command("promote"), T).phase is Phase.DRAINING


def test_promote_of_what_is_promoted_is_refused() -> None:
    with pytest.raises(RolloutRefused, match="draining already"):
        apply_command(rollout(Phase.DRAINING), command("promote"), T)


def test_back_after_the_end_starts_the_version_before_again_in_one_step() -> None:
    then = apply_command(rollout(Phase.PROMOTED), command("rollback"), T)
    assert (then.phase, then.candidate, then.stable, then.plan.steps) == (Phase.PENDING, V1, V2, (100.0,))
    assert then.plan.min_requests == 0, "nobody's traffic is waited for"


@pytest.mark.parametrize("now", [None, rollout(Phase.ROLLED_BACK), rollout(Phase.PROMOTED, stable=None)])
def test_back_is_refused_when_nothing_was_live_before(now: Rollout | None) -> None:
    with pytest.raises(RolloutRefused, match="no version was live before"):
        apply_command(now, command("rollback"), T)


def test_back_may_name_any_earlier_version() -> None:
    then = apply_command(rollout(Phase.PROMOTED, candidate=V3, stable=V2), command("rollback", version=1), T)
    assert (then.phase, then.candidate, then.stable, then.plan.steps) == (Phase.PENDING, V1, V3, (100.0,))


def test_back_to_another_version_waits_for_the_rollout_that_runs() -> None:
    with pytest.raises(RolloutRefused, match="abort it first"):
        apply_command(rollout(Phase.SHIFTING), command("rollback", version=3), T)
    assert apply_command(rollout(Phase.SHIFTING), command("rollback", version=1), T).phase is Phase.ABORTING


ASKING = replace(PLAN, approve=(5.0, 100.0))


@pytest.mark.parametrize(
    ("phase", "step", "approved"),
    [(Phase.PENDING, None, 0), (Phase.VERIFYING, None, 0), (Phase.SHIFTING, 1, 2)],
)
@pytest.mark.parametrize("hold", [None, Hold.APPROVAL])
def test_approve_allows_the_next_step(
    phase: Phase, step: int | None, approved: int, hold: Hold | None
) -> None:
    then = apply_command(rollout(phase, step=step, plan=ASKING, hold=hold), command("approve"), T)
    assert (then.approved, then.hold, then.phase, then.by) == (approved, None, phase, "ann")


def test_approve_does_not_end_a_pause() -> None:
    then = apply_command(
        rollout(Phase.SHIFTING, step=1, plan=ASKING, hold=Hold.PAUSED), command("approve"), T
    )
    assert (then.approved, then.hold) == (2, Hold.PAUSED)


@pytest.mark.parametrize(
    ("phase", "step", "message"),
    [(Phase.SHIFTING, 0, "50% needs no approval"), (Phase.BAKING, 2, "all traffic already")],
)
def test_what_needs_no_approval_cannot_be_approved(phase: Phase, step: int, message: str) -> None:
    with pytest.raises(RolloutRefused, match=message):
        apply_command(rollout(phase, step=step, plan=ASKING), command("approve"), T)


def test_what_waits_for_approval_is_not_resumed() -> None:
    with pytest.raises(RolloutRefused, match="approve it"):
        apply_command(rollout(Phase.SHIFTING, hold=Hold.APPROVAL, plan=ASKING), command("resume"), T)


@pytest.mark.parametrize(
    ("hold", "kept"), [(Hold.FAILED, False), (Hold.INVALID, False), (Hold.INCONCLUSIVE, True)]
)
def test_resume_keeps_the_evidence_unless_it_was_overruled(hold: Hold, kept: bool) -> None:
    now = rollout(Phase.SHIFTING, hold=hold, evidence={"guards": 1})
    assert bool(apply_command(now, command("resume"), T).evidence) is kept
