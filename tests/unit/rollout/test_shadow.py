"""The phase between the golden rows and the first traffic: recorded requests are sent to the candidate."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from serin.commands.rollout_view import frame
from serin.errors import RolloutRefused
from serin.formats.serving.journal import Decision
from serin.reports.rollout_page import story2html
from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.shadow import MOST_VALUES, Batch, Difference, Tally, add_batch, judge_shadow
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.shadow import Shadows
from serin.rollout.run.status import history, model_status
from serin.rollout.run.story import tell
from serin.spec.objectives import ObjectivesSpec
from serin.spec.rollout import RolloutSpec
from serin.spec.serving import ServingSpec
from tests.fakes.one_gateway import LogJudge
from tests.fakes.rollout import FakeReplayer
from tests.unit.rollout.conftest import PLAN, Scene, release

SHADOW = replace(PLAN, shadow=ShadowPlan(rows=1000, time_s=3.0), slo_ms=50.0)


def begun(scene: Scene, plan: Plan = SHADOW) -> Rollout:
    scene.promote_first()
    scene.command("start", 2, plan=plan)
    return scene.until(Phase.SHADOWING)


def held(scene: Scene, hold: Hold) -> Rollout:
    return scene.until_true(lambda now: now.hold is hold)


def test_no_client_reaches_a_candidate_before_it_has_answered_recorded_requests(scene: Scene) -> None:
    now = begun(scene)
    assert (now.weight_percent, now.step) == (0.0, None)
    then = scene.until(Phase.SHIFTING)
    assert len(scene.replayer.sent) >= 10
    assert scene.router.shares("flights") == [("flights-v1", 100.0), ("flights-v2", 5.0)]
    assert then.reason.startswith("1000 recorded rows are answered as its bundle computes them")
    assert "differ from the live version's by 0.01 (2%) on average" in then.reason
    scene.until(Phase.PROMOTED)
    assert all(replay.stopped for replay in scene.replayer.started)


def test_the_table_of_the_replay_is_in_the_decision_that_ends_it(scene: Scene) -> None:
    begun(scene)
    scene.until(Phase.PROMOTED)
    (ended,) = [
        row for row in history(scene.home, "flights") if row.phase == "shifting" and "shadow" in row.evidence
    ]
    tally = Tally.from_json(ended.evidence["shadow"])
    assert tally.segments["all rows"].rows == tally.rows == 1000


def test_a_mismatch_rolls_back_with_the_row_and_both_scores_in_the_journal(scene: Scene) -> None:
    scene.replayer.wrong_at = 3
    begun(scene)
    now = scene.until(Phase.ROLLED_BACK)
    assert now.reason == (
        "it does not serve what its bundle computes: row 0 of request r17 (carrier=AA) is served with score 0.4, its "
        "bundle computes 0.8; asked twice"
    )
    assert now.evidence["shadow"]["mismatch"]["values"] == {"carrier": "AA", "temp": "nan"}
    assert scene.router.shares("flights") == [("flights-v1", 100.0)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed": 30}, "more than 0.6% of its requests fail"),
        ({"us": 90_000.0}, "more than 6% of its requests take longer than 50.0 ms"),
    ],
)
def test_a_broken_promise_rolls_back_before_any_client_sees_it(
    scene: Scene, changes: dict[str, Any], reason: str
) -> None:
    scene.replayer = FakeReplayer(**changes)
    begun(scene)
    assert reason in scene.until(Phase.ROLLED_BACK).reason


def test_latencies_count_only_against_the_promise(scene: Scene) -> None:
    scene.replayer.us = 49_000.0  # however much slower than the live version
    begun(scene)
    scene.until(Phase.SHIFTING)


@pytest.mark.parametrize(("limit", "ends"), [(0.021, Phase.SHIFTING), (0.019, Phase.ABORTING)])
def test_a_candidate_beyond_the_largest_difference_is_refused(
    scene: Scene, limit: float, ends: Phase
) -> None:
    assert SHADOW.shadow is not None
    begun(scene, replace(SHADOW, shadow=replace(SHADOW.shadow, max_difference=limit)))
    now = scene.until(Phase.SHIFTING, Phase.ABORTING)
    assert now.phase is ends
    if ends is Phase.ABORTING:
        assert "by more than 1.9% of the mean score: all rows: 0.01 (2%)" in now.reason


def test_without_records_it_waits_for_them_and_then_continues(scene: Scene) -> None:
    scene.replayer.recorded = 0
    begun(scene)
    now = held(scene, Hold.NO_TRAFFIC)
    assert now.reason.startswith("no request of flights-v1 is recorded yet; it waits for them")
    scene.replayer.recorded = 10_000
    scene.until(Phase.SHIFTING)


def test_too_few_records_by_the_deadline_ask_for_a_person_who_may_wait_on(scene: Scene) -> None:
    scene.replayer.recorded = 400
    begun(scene, replace(SHADOW, deadline_s=5.0))
    now = held(scene, Hold.INCONCLUSIVE)
    assert "400 of 1000 recorded rows are answered" in now.reason
    scene.replayer.recorded = 10_000
    scene.tick(20)
    assert scene.replayer.sent == [1, 2, 3, 4], "nothing is sent while a person is asked"
    scene.command("resume")
    scene.until(Phase.SHIFTING)
    assert scene.replayer.sent == list(range(1, 11)), "what was answered before still counts"


def test_a_person_can_pause_resume_approve_promote_and_abort(scene: Scene) -> None:
    begun(scene, replace(SHADOW, approve=(5.0,)))
    scene.command("pause")
    held(scene, Hold.PAUSED)
    sent = len(scene.replayer.sent)
    scene.tick(30)
    assert len(scene.replayer.sent) == sent
    scene.command("resume")
    assert "5% of traffic waits for approval" in held(scene, Hold.APPROVAL).reason
    scene.command("approve")
    scene.until(Phase.SHIFTING)
    scene.command("abort")
    scene.until(Phase.ROLLED_BACK)
    scene.replayer.recorded = 0
    scene.command("start", 3, plan=SHADOW)
    held(scene, Hold.NO_TRAFFIC)
    scene.command("promote")
    now = scene.until(Phase.BAKING)
    assert (now.weight_percent, now.by) == (100.0, "ann")
    scene.until(Phase.PROMOTED)
    scene.command("start", 2, plan=SHADOW)
    scene.until(Phase.SHADOWING)
    scene.command("abort")
    scene.until(Phase.ROLLED_BACK)


def test_a_held_refusal_begins_from_nothing_when_a_person_resumes_it(scene: Scene) -> None:
    scene.replayer.wrong_at = 2
    begun(scene, replace(SHADOW, mode="hold"))
    held(scene, Hold.FAILED)
    scene.replayer.wrong_at = None
    scene.command("resume")
    now = scene.until(Phase.SHIFTING)
    assert scene.replayer.sent == [1, 2, *range(1, 11)]
    assert Tally.from_json(now.evidence["shadow"]).rows == 1000


def test_what_is_observed_only_moves_on_when_it_passes_and_stays_when_it_does_not(scene: Scene) -> None:
    begun(scene, replace(SHADOW, mode="observe"))
    scene.until(Phase.SHIFTING)
    scene.command("abort")
    scene.until(Phase.ROLLED_BACK)
    scene.replayer.wrong_at = 1
    scene.command("start", 3, plan=replace(SHADOW, mode="observe"))
    scene.until_true(lambda now: now.verdict is Verdict.FAIL)
    scene.tick(10)
    (now,) = scene.controller.rollouts()
    assert now.phase is Phase.SHADOWING
    assert now.reason.startswith("observed only: it does not serve")


def test_a_controller_that_is_killed_counts_no_batch_twice(scene: Scene) -> None:
    begun(scene, replace(SHADOW, shadow=ShadowPlan(rows=3000, time_s=0.0)))
    scene.tick(5)
    scene.command("pause")  # the batches so far are in the journal
    held(scene, Hold.PAUSED)
    scene.kill()
    scene.command("resume")
    scene.tick(4)
    scene.kill()  # the newest batches are not
    now = scene.until(Phase.SHIFTING)
    tally = Tally.from_json(now.evidence["shadow"])
    assert (tally.rows, tally.counts.requests, tally.place) == (3000, 3000, {"batch": 30})
    assert len(scene.replayer.sent) > 30, "some had to be sent again"


def test_a_replay_that_exits_is_started_again_where_it_was(scene: Scene) -> None:
    scene.replayer.dies_at = 4
    begun(scene)
    now = scene.until_true(lambda now: "exited with code -9" in now.reason)
    assert now.hold is None
    scene.until(Phase.SHIFTING)
    assert [replay.at for replay in scene.replayer.started] == [4, 10]


def test_requests_that_cannot_be_sent_hold_the_rollout_with_the_reason(scene: Scene) -> None:
    scene.replayer.unable = "column 'temp' is missing"
    begun(scene)
    now = held(scene, Hold.INVALID)
    assert now.reason == (
        "recorded requests cannot be replayed: column 'temp' is missing; resume, promote or abort it"
    )


def test_a_candidate_that_dies_while_it_answers_recorded_requests_is_rolled_back(scene: Scene) -> None:
    begun(scene)
    scene.tick()
    scene.fleet.restart(release(2))
    assert scene.until(Phase.ROLLED_BACK).reason == "flights-v2 is not running"


def test_a_rollout_without_usable_records_is_refused_at_its_start(scene: Scene) -> None:
    scene.command("start", 1, plan=SHADOW)
    scene.until(Phase.PROMOTED)  # the first release has nothing to be compared with
    scene.replayer.refusal = "monitoring.capture.share is 0"
    command = scene.command("start", 2, plan=SHADOW)
    scene.tick()
    assert not scene.answer(command).accepted
    assert "monitoring.capture.share is 0" in scene.answer(command).reason


def test_a_rollback_and_a_promotion_before_it_skip_recorded_requests(scene: Scene) -> None:
    scene.replayer.recorded = 0
    scene.promote_first()
    scene.command("start", 2, plan=SHADOW)
    scene.command("promote")
    scene.until(Phase.PROMOTED)
    scene.command("rollback")
    scene.until_true(lambda now: now.candidate.version == 1 and now.phase is Phase.PROMOTED)
    assert scene.replayer.sent == []


def test_the_status_names_the_phase_without_traffic(scene: Scene) -> None:
    begun(scene)
    status = model_status(scene.home, "flights")
    assert (status.rollout.phase, status.rollout.weight_percent, status.live) == ("shadowing", 0.0, 1)


def test_a_plan_with_and_without_recorded_requests_is_read_from_its_journal() -> None:
    spec = RolloutSpec.model_validate({"steps": ["shadow", 5, 100], "shadow": {"rows": 7, "time": "2m"}})
    plan = Plan.from_spec(spec, ServingSpec(), ObjectivesSpec())
    assert plan.steps == (5.0, 100.0)
    assert plan.shadow == ShadowPlan(rows=7, time_s=120.0)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(Plan().to_json()) == Plan()


def test_a_batch_and_a_tally_survive_their_journal() -> None:
    tally = Tally()
    for number in (1, 2):
        batch = FakeReplayer(wrong_at=2, failed=3).batch(number)
        assert Batch.from_json(batch.to_json()) == batch
        tally = add_batch(tally, Batch.from_json(batch.to_json()), SHADOW)
    assert Tally.from_json(tally.to_json()).to_json() == tally.to_json()


def test_the_values_of_a_segment_s_column_are_bounded() -> None:
    tally = Tally()
    for number in range(3 * MOST_VALUES):
        tally = add_batch(tally, FakeReplayer().batch(number), SHADOW)
    assert len(tally.segments) == MOST_VALUES + 2  # all rows, the values, the others together
    assert tally.segments["carrier=other values"].rows == 2 * MOST_VALUES
    assert sum(found.rows for name, found in tally.segments.items() if name != "all rows") == 3 * MOST_VALUES


def test_a_small_segment_is_shown_and_not_judged_and_a_score_that_is_lost_is() -> None:
    small, large = Difference(rows=5, live=1.0, absolute=5.0), Difference(rows=99, live=9.9, absolute=0.1)
    lost = Difference(rows=99, live=9.9, lost=1)
    tally = Tally(segments={"all rows": large, "carrier=AA": small, "carrier=UA": lost})
    assert [name for name, _ in tally.beyond(0.05)] == ["carrier=UA"]


def test_a_candidate_without_a_graph_is_judged_by_the_rest() -> None:
    tally = add_batch(Tally(), replace(FakeReplayer(rows=1000).batch(1), compared=0), SHADOW)
    verdict, reason = judge_shadow(SHADOW, tally, elapsed_s=10.0)
    assert verdict is Verdict.PASS
    assert "it has no graph to compare the scores with" in reason


def test_a_controller_without_records_refuses_the_step(scene: Scene) -> None:
    with pytest.raises(RolloutRefused, match=r"leave shadow out of rollout\.steps"):
        Shadows(None).check(begun(scene))


def test_a_journal_s_line_of_the_phase_is_read_back_as_it_was(scene: Scene) -> None:
    now = begun(scene)
    (row,) = [row for row in history(scene.home, "flights", now.id) if row.phase == "shadowing"][:1]
    assert decision2rollout(row).plan == SHADOW


def course(scene: Scene) -> list[Decision]:
    now = begun(scene, replace(SHADOW, shadow=ShadowPlan(rows=300, time_s=0.0, max_difference=0.5)))
    scene.until(Phase.ROLLED_BACK, Phase.SHIFTING)
    return history(scene.home, "flights", now.id)


def test_the_report_shows_recorded_requests_by_segment(scene: Scene) -> None:
    story = tell(course(scene))
    assert [(found.name, found.rows) for found in story.shadow.segments][:2] == [
        ("all rows", 300),
        ("carrier=1", 1),
    ]
    page = story2html(story)
    assert "Steps: shadow, 5%, 50%, 100%" in page
    assert "300 recorded rows were answered in 300 requests; at least 300 were needed." in page
    more = replace(story.shadow, rows=525)
    assert more.lines[0] == "525 recorded rows were answered in 300 requests; at least 300 were needed."
    fewer = replace(story.shadow, rows=25, requests=2)
    assert fewer.lines[0] == "25 of 300 recorded rows were answered in 2 requests."
    assert "All 300 served scores are what the candidate&#x27;s own bundle computes." in page
    assert "no segment is beyond it" in page
    assert '<td>all rows</td><td class="n">300</td><td class="n">0.5</td><td class="n">+0</td>' in page


def test_the_report_shows_the_row_that_was_served_otherwise(scene: Scene) -> None:
    scene.replayer.wrong_at = 2
    page = story2html(tell(course(scene)))
    assert "is served with score 0.4, its bundle computes 0.8" in page
    assert "<tr><td>temp</td><td>nan</td></tr>" in page


def test_a_report_without_the_step_says_nothing_of_it(scene: Scene) -> None:
    begun_without = scene.command("start", 1)
    scene.until(Phase.PROMOTED)
    assert "ecorded requests" not in story2html(tell(history(scene.home, "flights", begun_without)))


def test_the_live_view_and_the_status_show_it_while_it_runs(scene: Scene) -> None:
    now = begun(scene)
    scene.tick(3)
    scene.command("pause")
    scene.tick()
    console = Console(record=True, width=160, file=StringIO())
    console.print(frame(history(scene.home, "flights", now.id), LogJudge(scene.home / "none"), scene.clock.t))
    shown = console.export_text()
    assert "of 1000 recorded rows were answered" in shown
    assert "all rows" in shown
    status = model_status(scene.home, "flights")
    assert status.rollout.shadow.rows >= 300
