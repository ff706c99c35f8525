"""Every decision of a rollout, as tables: what follows a verdict, and what follows a command."""

from dataclasses import replace
from typing import Any

import pytest

from serin.errors import RolloutRefused
from serin.rollout.decide.advance import Seen, advance
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Command, Kind
from serin.store.artifacts import ModelRoute, Release

V1, V2, V3 = (Release(model="flights", version=n) for n in (1, 2, 3))
PLAN = Plan(steps=(5.0, 50.0, 100.0), load_s=60.0, drain_s=20.0, unready_s=2.0)
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


def seen(verdict: Verdict | None = None, **changes: Any) -> Seen:
    judgement = Judgement(verdict=verdict, reason="as judged", evidence={"n": 1}) if verdict else None
    return Seen(judgement=judgement, **changes)


P, S = Phase, Verdict

ASKING = replace(PLAN, approve=(5.0, 100.0))

FORWARD = [
    (rollout(P.PENDING), seen(), (P.LOADING, None)),
    (rollout(P.LOADING), seen(candidate="absent"), (P.LOADING, None)),
    (rollout(P.LOADING), seen(candidate="starting"), (P.LOADING, None)),
    (rollout(P.LOADING), seen(candidate="ready"), (P.VERIFYING, None)),
    (rollout(P.VERIFYING), seen(), (P.VERIFYING, None)),
    (rollout(P.VERIFYING), seen(verified=True), (P.SHIFTING, 0)),
    (rollout(P.VERIFYING), seen(verified=True, lacks="1 of 3 replicas"), (P.VERIFYING, None)),
    (rollout(P.VERIFYING, stable=None), seen(verified=True, lacks="1 of 3 replicas"), (P.VERIFYING, None)),
    (rollout(P.SHIFTING), seen(S.WAIT), (P.SHIFTING, 0)),
    (rollout(P.SHIFTING), seen(S.PASS, lacks="1 of 3 replicas"), (P.SHIFTING, 0)),
    (rollout(P.SHIFTING), seen(S.FAIL, lacks="1 of 3 replicas"), (P.ABORTING, 0)),
    (rollout(P.SHIFTING), seen(S.PASS), (P.SHIFTING, 1)),
    (rollout(P.BAKING), seen(S.WAIT), (P.BAKING, 2)),
    (rollout(P.BAKING), seen(S.NO_TRAFFIC), (P.BAKING, 2)),
    (rollout(P.BAKING), seen(S.PASS), (P.DRAINING, 2)),
    (rollout(P.BAKING), seen(S.PASS, routed=False), (P.BAKING, 2)),
    (rollout(P.DRAINING), seen(active_requests=3), (P.DRAINING, 2)),
    (rollout(P.DRAINING), seen(active_requests=None), (P.DRAINING, 2)),
    (rollout(P.DRAINING), seen(active_requests=0), (P.PROMOTED, 2)),
    (rollout(P.ABORTING), seen(active_requests=3), (P.ABORTING, None)),
    (rollout(P.ABORTING), seen(active_requests=0, candidate="dead"), (P.ROLLED_BACK, None)),
    (rollout(P.SHIFTING), seen(S.WAIT, candidate="starting", unready_s=1.5), (P.SHIFTING, 0)),
    (rollout(P.SHIFTING, plan=ASKING), seen(S.PASS), (P.SHIFTING, 1)),
    (rollout(P.SHIFTING, step=1), seen(S.PASS), (P.BAKING, 2)),
    (rollout(P.VERIFYING, plan=replace(PLAN, steps=(100.0,))), seen(verified=True), (P.BAKING, 0)),
]


@pytest.mark.parametrize(("now", "what", "expected"), FORWARD)
def test_a_rollout_goes_forward_as_the_table_says(
    now: Rollout, what: Seen, expected: tuple[Phase, int | None]
) -> None:
    then = advance(now, what, T)
    assert (then.phase, then.step) == expected


@pytest.mark.parametrize(
    ("now", "what", "reason"),
    [
        (rollout(P.LOADING), seen(candidate="dead"), "exited while it was loading"),
        (rollout(P.LOADING), seen(candidate="absent", problem="no such bundle"), "no such bundle"),
        (rollout(P.VERIFYING), seen(problem="score 0.1 instead of 0.9"), "score 0.1"),
        (rollout(P.VERIFYING), seen(candidate="dead"), "not running"),
        (rollout(P.SHIFTING), seen(S.PASS, candidate="dead"), "not running"),
        (rollout(P.SHIFTING), seen(S.PASS, candidate="absent"), "not running"),
        (rollout(P.SHIFTING), seen(S.PASS, candidate="starting", unready_s=2.5), "not been ready for 2.5 s"),
        (rollout(P.SHIFTING), seen(S.FAIL), "as judged"),
        (rollout(P.BAKING), seen(S.FAIL), "as judged"),
        (rollout(P.BAKING), seen(S.WAIT, candidate="dead"), "not running"),
        (rollout(P.DRAINING), seen(active_requests=0, candidate="dead"), "not running"),
        (rollout(P.LOADING, since=T - 61), seen(candidate="starting"), "not ready within 60 s"),
        (rollout(P.SHIFTING, step=1, plan=ASKING, hold=Hold.APPROVAL), seen(S.FAIL), "as judged"),
        *(
            (rollout(P.SHIFTING, hold=hold), seen(S.FAIL), "as judged")
            for hold in (Hold.PAUSED, Hold.INCONCLUSIVE, Hold.NO_TRAFFIC)
        ),
        *(
            (
                rollout(P.SHIFTING, plan=replace(PLAN, mode=mode)),
                seen(S.WAIT, candidate="dead"),
                "not running",
            )
            for mode in ("hold", "observe")
        ),
    ],
)
def test_a_candidate_that_fails_is_rolled_back_from_every_phase_hold_and_mode(
    now: Rollout, what: Seen, reason: str
) -> None:
    then = advance(now, what, T)
    assert (then.phase, then.verdict, then.weight_percent) == (P.ABORTING, S.FAIL, 0)
    assert reason in then.reason


@pytest.mark.parametrize("phase", [P.PROMOTED, P.ROLLED_BACK])
@pytest.mark.parametrize("verdict", [None, *Verdict])
def test_a_final_phase_absorbs_everything(phase: Phase, verdict: Verdict | None) -> None:
    now = rollout(phase)
    assert advance(now, seen(verdict, candidate="dead", problem="x", stable_ready=False), T) is now


def test_the_first_release_is_routed_when_it_is_verified_and_live_when_the_gateway_has_the_route() -> None:
    routed = advance(rollout(P.VERIFYING, stable=None), seen(verified=True), T)
    assert (routed.phase, routed.live) == (P.DRAINING, None)
    assert routed.route == ModelRoute(model="flights", epoch=8, stable=V2)
    for too_soon, what in ((T + 5, seen(routed=False)), (T + 0.5, seen())):
        assert advance(routed, what, too_soon) == routed
    live = advance(routed, seen(active_requests=None), T + 5)
    assert (live.phase, live.live, live.route) == (P.PROMOTED, V2, routed.route)


def test_the_first_release_that_dies_before_it_is_live_leaves_no_route() -> None:
    now = advance(rollout(P.VERIFYING, stable=None), seen(verified=True), T)
    assert advance(now, seen(candidate="dead"), T + 0.5).route is None


@pytest.mark.parametrize("verdict", [S.NO_TRAFFIC, S.INCONCLUSIVE, S.INVALID, S.INCIDENT])
def test_what_cannot_be_judged_holds_and_moves_no_traffic(verdict: Verdict) -> None:
    now = rollout(P.SHIFTING)
    then = advance(now, seen(verdict), T)
    assert (then.hold, then.route, then.verdict) == (Hold(verdict.value), now.route, verdict)


@pytest.mark.parametrize("hold", [Hold.PAUSED, Hold.INCONCLUSIVE, Hold.INVALID, Hold.FAILED])
def test_a_hold_that_waits_for_a_person_does_not_end_by_itself(hold: Hold) -> None:
    then = advance(rollout(P.SHIFTING, hold=hold), seen(S.PASS), T)
    assert (then.phase, then.step, then.hold) == (P.SHIFTING, 0, hold)


def test_the_step_s_time_begins_when_traffic_is_back() -> None:
    then = advance(rollout(P.SHIFTING, hold=Hold.NO_TRAFFIC), seen(S.PASS), T)
    assert (then.hold, then.step, then.since, then.epoch) == (None, 0, T, 7)


@pytest.mark.parametrize("verdict", [S.WAIT, S.PASS, S.FAIL])
def test_after_an_incident_the_step_begins_again(verdict: Verdict) -> None:
    then = advance(rollout(P.SHIFTING, hold=Hold.INCIDENT), seen(verdict), T)
    assert (then.phase, then.hold, then.step, then.evidence) == (P.SHIFTING, None, 0, {"n": 1})
    assert (then.since, then.evidence_from, then.epoch) == (T, T, 8)


@pytest.mark.parametrize("what", [{"stable_ready": False}, {"routed": False}])
def test_trouble_beside_the_candidate_is_an_incident_and_no_pass(what: dict[str, Any]) -> None:
    then = advance(rollout(P.SHIFTING), seen(S.PASS, **what), T)
    assert (then.hold, then.step) == (Hold.INCIDENT, 0)


@pytest.mark.parametrize(("phase", "step"), [(P.VERIFYING, None), (P.SHIFTING, 1)])
def test_a_step_that_needs_approval_waits_for_it(phase: Phase, step: int | None) -> None:
    now = rollout(phase, step=step, plan=ASKING)
    then = advance(now, seen(S.PASS, verified=True), T)
    assert (then.phase, then.step, then.hold, then.route) == (phase, step, Hold.APPROVAL, now.route)
    assert "% of traffic waits for approval" in then.reason
    assert advance(then, seen(S.WAIT, verified=True), T).reason == then.reason


@pytest.mark.parametrize(
    ("phase", "step", "to"), [(P.VERIFYING, None, P.SHIFTING), (P.SHIFTING, 1, P.BAKING)]
)
def test_an_approved_step_is_taken_once_the_evidence_is_there(
    phase: Phase, step: int | None, to: Phase
) -> None:
    now = rollout(phase, step=step, plan=ASKING, approved=0 if step is None else step + 1)
    assert advance(now, seen(S.WAIT, verified=False), T).phase is phase
    assert advance(now, seen(S.PASS, verified=True), T).phase is to


@pytest.mark.parametrize("phase", [P.PENDING, P.VERIFYING, P.BAKING, P.DRAINING])
def test_a_pause_stops_the_way_forward_in_every_phase(phase: Phase) -> None:
    now = rollout(phase, hold=Hold.PAUSED, reason="lunch", by="ann")
    then = advance(now, seen(S.PASS, verified=True), T)
    assert (then.phase, then.reason, then.by) == (phase, "lunch", "ann")


def test_mode_hold_asks_instead_of_rolling_back() -> None:
    then = advance(rollout(P.SHIFTING, plan=replace(PLAN, mode="hold")), seen(S.FAIL), T)
    assert (then.phase, then.hold) == (P.SHIFTING, Hold.FAILED)


@pytest.mark.parametrize("what", [seen(S.PASS), seen(S.FAIL), seen(S.INCIDENT)])
def test_mode_observe_records_and_never_acts(what: Seen) -> None:
    now = rollout(P.SHIFTING, plan=replace(PLAN, mode="observe"))
    then = advance(now, what, T)
    assert (then.route, then.hold) == (now.route, None)
    assert then.reason.startswith("observed only: ")


def test_the_wait_for_a_release_that_does_not_drain_is_bounded() -> None:
    then = advance(rollout(P.DRAINING, since=T - 20), seen(active_requests=2), T)
    assert then.phase is P.PROMOTED
    assert "requests in flight: 2" in then.reason


@pytest.mark.parametrize("phase", [P.DRAINING, P.ABORTING])
@pytest.mark.parametrize("what", [{"since": T - 0.5}, {"hold": Hold.PAUSED}])
def test_a_release_is_given_a_moment_before_it_counts_as_drained(phase: Phase, what: dict[str, Any]) -> None:
    assert advance(rollout(phase, **what), seen(active_requests=0), T).phase is phase


def test_nothing_ends_before_the_gateway_has_the_weights() -> None:
    assert advance(rollout(P.ABORTING), seen(active_requests=0, routed=False), T).phase is P.ABORTING


def test_every_change_of_the_route_is_a_new_epoch_and_nothing_else_is() -> None:
    now, epochs = rollout(P.PENDING), []
    for what in (
        seen(),
        seen(),
        seen(verified=True),
        seen(S.WAIT),
        seen(S.PASS),
        seen(S.PASS),
        seen(S.PASS),
        seen(),
    ):
        now = advance(now, what, T)
        now = replace(now, since=T - 5)
        epochs.append((now.phase, now.weight_percent, now.epoch))
    assert epochs == [
        (P.LOADING, 0, 7),
        (P.VERIFYING, 0, 7),
        (P.SHIFTING, 5, 8),
        (P.SHIFTING, 5, 8),
        (P.SHIFTING, 50, 9),
        (P.BAKING, 100, 10),
        (P.DRAINING, 100, 10),
        (P.PROMOTED, 100, 11),
    ]


@pytest.mark.parametrize(
    ("phase", "step", "expected"),
    [
        (P.PENDING, None, ModelRoute(model="flights", epoch=7, stable=V1)),
        (P.VERIFYING, None, ModelRoute(model="flights", epoch=7, stable=V1)),
        (P.SHIFTING, 1, ModelRoute(model="flights", epoch=7, stable=V1, candidate=V2, candidate_percent=50)),
        (P.BAKING, 2, ModelRoute(model="flights", epoch=7, stable=V1, candidate=V2, candidate_percent=100)),
        (P.DRAINING, 2, ModelRoute(model="flights", epoch=7, stable=V1, candidate=V2, candidate_percent=100)),
        (P.PROMOTED, 2, ModelRoute(model="flights", epoch=7, stable=V2)),
        (P.ABORTING, None, ModelRoute(model="flights", epoch=7, stable=V1)),
        (P.ABORTING, 1, ModelRoute(model="flights", epoch=7, stable=V1, candidate=V2, candidate_percent=0)),
        (P.ROLLED_BACK, 1, ModelRoute(model="flights", epoch=7, stable=V1)),
    ],
)
def test_the_route_follows_from_the_phase(phase: Phase, step: int | None, expected: ModelRoute) -> None:
    assert rollout(phase, step=step).route == expected


@pytest.mark.parametrize("phase", [P.PENDING, P.LOADING, P.VERIFYING, P.ABORTING, P.ROLLED_BACK])
def test_a_model_without_a_live_release_has_no_route(phase: Phase) -> None:
    assert rollout(phase, stable=None).route is None


@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.INVALID])
def test_a_hold_that_does_not_end_by_itself_says_what_a_person_can_do(verdict: Verdict) -> None:
    now = rollout(Phase.SHIFTING)
    for _ in range(3):
        now = advance(now, seen(verdict), T)
    assert now.reason == "as judged; resume, promote or abort it"
    assert "resume" not in advance(rollout(Phase.SHIFTING), seen(Verdict.NO_TRAFFIC), T).reason


def test_a_failure_while_a_person_is_asked_for_approval_is_reported() -> None:
    asking = rollout(Phase.SHIFTING, plan=replace(PLAN, mode="hold"), hold=Hold.APPROVAL, reason="50% waits")
    now = advance(asking, seen(Verdict.FAIL), T)
    assert (now.hold, now.reason) == (Hold.FAILED, "as judged; resume, promote or abort it")


def command(kind: Kind, **changes: Any) -> Command:
    return Command(**({"kind": kind, "model": "flights", "by": "ann", "id": "c1"} | changes))


@pytest.mark.parametrize(
    ("now", "given", "reason"),
    [
        (None, command("start"), "name the version"),
        (rollout(P.PROMOTED), command("start", version=2), "version 2 is live already"),
        (rollout(P.SHIFTING), command("resume"), "not held"),
        (rollout(P.SHIFTING, hold=Hold.APPROVAL, plan=ASKING), command("resume"), "approve it"),
        (rollout(P.SHIFTING, hold=Hold.PAUSED), command("pause"), "paused already"),
        (rollout(P.SHIFTING, plan=ASKING), command("approve"), "50% needs no approval"),
        (rollout(P.BAKING, plan=ASKING), command("approve"), "all traffic already"),
        (rollout(P.DRAINING), command("promote"), "draining already"),
        (rollout(P.SHIFTING), command("rollback", version=3), "abort it first"),
        (None, command("rollback"), "no version was live before"),
        (rollout(P.ROLLED_BACK), command("rollback"), "no version was live before"),
        (rollout(P.PROMOTED, stable=None), command("rollback"), "no version was live before"),
    ],
)
def test_an_impossible_command_is_refused_with_the_reason(
    now: Rollout | None, given: Command, reason: str
) -> None:
    with pytest.raises(RolloutRefused, match=reason):
        apply_command(now, given, T)


RUNNING = [phase for phase in Phase if not phase.final]
CHANGEABLE = [phase for phase in RUNNING if phase not in (Phase.ABORTING, Phase.RETIRING)]


def test_the_first_start_has_no_stable_release() -> None:
    then = apply_command(None, command("start", version=2, plan=PLAN), T)
    assert (then.id, then.phase, then.by) == ("c1", Phase.PENDING, "ann")
    assert (then.stable, then.candidate) == (None, V2)


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


def test_back_after_the_end_starts_the_version_before_again_in_one_step() -> None:
    then = apply_command(rollout(Phase.PROMOTED), command("rollback"), T)
    assert (then.phase, then.candidate, then.stable, then.plan.steps) == (Phase.PENDING, V1, V2, (100.0,))
    assert then.plan.min_requests == 0, "nobody's traffic is waited for"


def test_back_may_name_any_earlier_version() -> None:
    then = apply_command(rollout(Phase.PROMOTED, candidate=V3, stable=V2), command("rollback", version=1), T)
    assert (then.phase, then.candidate, then.stable, then.plan.steps) == (Phase.PENDING, V1, V3, (100.0,))


def test_back_to_the_live_version_aborts_the_rollout_that_runs() -> None:
    assert apply_command(rollout(Phase.SHIFTING), command("rollback", version=1), T).phase is Phase.ABORTING


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
    ("hold", "kept"), [(Hold.FAILED, False), (Hold.INVALID, False), (Hold.INCONCLUSIVE, True)]
)
def test_resume_keeps_the_evidence_unless_it_was_overruled(hold: Hold, kept: bool) -> None:
    now = rollout(Phase.SHIFTING, hold=hold, evidence={"guards": 1})
    assert bool(apply_command(now, command("resume"), T).evidence) is kept
