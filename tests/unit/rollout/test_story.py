"""A rollout as people read it: its story and its reasons, how sure the evidence is, and what is missing."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from serin.commands.rollout_view import frame
from serin.evidence.e_process import bet, e_value, seconds_until, start
from serin.formats.serving.journal import NOT_PROMISED, Decision
from serin.formats.serving.request import Request
from serin.reports.rollout_page import story2html
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import doubt, duration, not_proven
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.decide.verdict import judge_step
from serin.rollout.run.replay import replay
from serin.rollout.run.status import history
from serin.rollout.run.story import tell
from tests.fakes.one_gateway import LogJudge
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.kit.commands import serin_main
from tests.unit.rollout.conftest import Scene

PLAN = Plan(steps=(20.0, 50.0, 100.0), step_s=5.0, min_requests=30, bake_s=3.0, drain_s=2.0, slo_ms=50.0)


@dataclass
class Course:
    """A rollout that was judged from requests, and what it left."""

    scene: Scene
    log: Path
    decisions: list[Decision]
    while_shifting: list[Decision]


def run(scene: Scene, log: Path, traffic: Traffic) -> Course:
    scene.judge = LogJudge(log)  # type: ignore[assignment]
    scene.promote_first()
    started = scene.command("start", 2, plan=PLAN)
    shifting: list[Decision] = []
    for second in range(150):
        scene.tick()
        (now,) = scene.controller.rollouts()
        if now.id == started and now.phase.final:
            break
        decisions = history(scene.home, "flights", started)
        if now.phase is Phase.SHIFTING and len(decisions) > 5:
            shifting = shifting or decisions
        write(log, now, traffic, scene.clock.t, second)
        scene.clock.t += 0.5
    return Course(scene, log, history(scene.home, "flights", started), shifting)


def write(log: Path, now: Rollout, traffic: Traffic, t: float, seed: int) -> None:
    traffic = replace(traffic, epoch=now.epoch, share=now.weight_percent / 100)
    with log.open("a") as file:
        for request in traffic.requests(t, 1.0, seed=seed):
            line: dict[str, Any] = request._asdict() | {"t": f"{request.t:.6f}"}
            if request.t + (request.us or 0) / 1e6 < t + 1.0:
                file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    home = tmp_path_factory.mktemp("bad")
    scene = Scene(home)
    yield run(scene, home / "requests.jsonl", Traffic(slower=2.0))
    scene.kill()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    home = tmp_path_factory.mktemp("good")
    scene = Scene(home)
    yield run(scene, home / "requests.jsonl", Traffic())
    scene.kill()


def test_a_slow_candidate_is_rolled_back_and_an_equal_one_promoted(bad: Course, good: Course) -> None:
    assert bad.decisions[-1].phase == Phase.ROLLED_BACK
    assert good.decisions[-1].phase == Phase.PROMOTED


def test_a_story_has_the_evidence_over_time_and_the_decisions_that_changed_something(bad: Course) -> None:
    story = tell(bad.decisions)
    assert len(story.points) > 3
    assert max(point.total for point in story.points) >= PLAN.rollback_at
    assert len(story.decisions) <= len(bad.decisions)
    assert [decision.phase for decision in story.decisions][-2:] == [Phase.ABORTING, Phase.ROLLED_BACK]
    assert story.latencies is not None
    assert all(counts.sum() > 100 for counts in story.latencies)


def test_the_page_stands_alone_and_its_drawings_are_well_formed(bad: Course) -> None:
    page = story2html(tell(bad.decisions))
    assert "rolled back" in page
    assert "flights-v2 against flights-v1" in page
    assert not re.search(r"<script|<link|src=|@import|https?://(?!www\.w3\.org)", page)
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 3
    for drawing in drawings:
        lines = ET.fromstring(drawing).findall("polyline")
        assert len(lines) > 3


def test_the_page_says_what_is_allowed(good: Course) -> None:
    assert "Allowed: slower by 10%; latencies of the first 10 s" in story2html(tell(good.decisions))
    last = good.decisions[-1]
    tolerant = replace(last, state=last.state | {"plan": last.state["plan"] | {"tolerance_ms": 1.0}})
    page = story2html(tell([*good.decisions[:-1], tolerant]))
    assert "Allowed: slower by 10% or 1 ms, whichever is more" in page
    assert NOT_PROMISED in page


def test_the_headline_gives_the_reason_that_decided(bad: Course, good: Course) -> None:
    for course, turn in ((bad, Phase.ABORTING), (good, Phase.BAKING)):
        reason = next(found.reason for found in course.decisions if found.phase == turn)
        head, _, _ = story2html(tell(course.decisions)).partition("</p>")
        assert head.endswith(escape(reason))


def test_the_page_says_why_the_rollout_began(good: Course) -> None:
    first = replace(good.decisions[0], reason="trained again because of drift: carrier drifted")
    page = story2html(tell([first, *good.decisions[1:]]))
    assert "<p>Trained again because of drift: carrier drifted.</p>" in page


def test_what_people_wrote_is_shown_as_text(good: Course) -> None:
    first = replace(good.decisions[0], reason="<script>alert(1)</script>")
    page = story2html(tell([first, *good.decisions[1:]]))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_rollout_without_measurements_has_a_story(good: Course) -> None:
    assert "Nothing was measured" in story2html(tell(good.decisions[:2]))


def test_a_replay_with_the_same_settings_comes_to_the_same_end(bad: Course, good: Course) -> None:
    found = replay(bad.decisions, [bad.log], lambda plan: plan)
    turned = next(decision for decision in bad.decisions if decision.phase == Phase.ABORTING)
    assert abs(found.failed.point.t - turned.t) <= 4
    assert replay(good.decisions, [good.log], lambda plan: plan).failed is None


def test_a_replay_with_a_wider_margin_lets_the_candidate_pass(bad: Course) -> None:
    found = replay(bad.decisions, [bad.log], lambda plan: replace(plan, margin=1.5, bad_margin=3.0))
    assert found.failed is None
    assert found.moments[-1].verdict in (Verdict.PASS, Verdict.WAIT)


def test_a_replay_without_the_log_reports_it(bad: Course, tmp_path: Path) -> None:
    assert replay(bad.decisions, [tmp_path / "none.jsonl"], lambda plan: plan).requests == 0


@pytest.mark.parametrize("when", ["shifting", "ended"])
def test_the_live_view_shows_weights_evidence_and_both_arms(bad: Course, when: str) -> None:
    decisions = bad.while_shifting if when == "shifting" else bad.decisions
    console = Console(record=True, width=140, height=50)
    console.print(frame(decisions, LogJudge(bad.log), decisions[-1].t + 5))
    text = console.export_text()
    for word in ("rollout of flights-v2", "all together", "p95", "candidate", "stable"):
        assert word in text
    assert ("20%" if when == "shifting" else "rolled_back") in text


def serin(bad: Course, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("SERIN_HOME", str(bad.scene.home))
    return serin_main("rollout", *arguments)


@pytest.mark.parametrize(("which", "word"), [("flights", "rolled back"), ("flights:1", "promoted")])
def test_the_command_writes_the_page_of_the_newest_rollout_or_of_a_version(
    bad: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, word: str
) -> None:
    page = tmp_path / "page.html"
    assert serin(bad, monkeypatch, "report", which, "--out", str(page)) == 0
    assert f">{word}</span>" in page.read_text()


def test_the_command_names_the_versions_whose_rollouts_are_known(
    bad: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serin(bad, monkeypatch, "report", "flights:7") == 2
    assert "no rollout of 'flights': '7'; known: 1, 2" in capsys.readouterr().err


def test_the_command_judges_again_and_says_both_ends(
    bad: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ("--log", str(bad.log))
    assert serin(bad, monkeypatch, "replay", "flights", *log) == 0
    assert (
        len(re.findall(r"^(then|now): +rolled back at .* p\d", capsys.readouterr().out, flags=re.MULTILINE))
        == 2
    )
    lax = tmp_path / "lax.yaml"
    model = "{onnx: model.onnx, task: regression, golden: rows.npz}"
    lax.write_text(f"name: flights\nmodel: {model}\nrollout: {{latency: {{margin: 1.5}}}}\n")
    assert serin(bad, monkeypatch, "replay", "flights", *log, "--spec", str(lax), "--json") == 0
    assert json.loads(capsys.readouterr().out)["failed_at"] is None


T = 1000.0
TOLD_PLAN = Plan(step_s=5.0, min_requests=50, slo_ms=50.0, warmup_s=0.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)


def seconds_of(traffic: Traffic, seconds: int, seed: int = 0) -> Iterator[Evidence]:
    """The evidence at the end of each second of a step of equal arms, by way of the journal."""
    known = Traffic(share=0.0, epoch=2).requests(T - 30, 30, seed=99)
    by_second: dict[int, list[Request]] = {}
    for line in traffic.requests(T, seconds, seed=seed):
        by_second.setdefault(int(line.t - T), []).append(line)
    evidence = fold(Evidence(), known, arm=ARM, plan=TOLD_PLAN)
    for second in range(seconds):
        evidence = fold(evidence, by_second.get(second, []), arm=ARM, plan=TOLD_PLAN, now=T + second + 1)
        evidence = Evidence.from_json(json.loads(json.dumps(evidence.to_json())))
        yield evidence


def after(traffic: Traffic, seconds: int) -> Evidence:
    return list(seconds_of(traffic, seconds))[-1]


def test_the_time_that_is_left_is_right_within_a_factor_of_three_once_half_of_it_is_over() -> None:
    ratios = []
    for seed in range(5):
        course = []
        for evidence in seconds_of(Traffic(requests_per_s=30), 400, seed):
            course.append(evidence)
            if not not_proven(TOLD_PLAN, evidence):
                break
        half = len(course) // 2
        left = [
            course[half].seconds_to_proof(f"not slower {name}", TOLD_PLAN.promote_at)
            for name in ("p50", "p95")
        ]
        ratios.append(max(wait for wait in left if wait is not None) / (len(course) - half))
    print("estimated over true time left:", *(f"{ratio:.2f}" for ratio in sorted(ratios)))
    assert 1 / 3 < sorted(ratios)[2] < 3


def test_more_traffic_means_less_time_left() -> None:
    slow, fast = (after(Traffic(requests_per_s=per_s), 20) for per_s in (6, 60))
    waits = [evidence.seconds_to_proof("not slower p50", 1e6) for evidence in (slow, fast)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert waits[1] < waits[0] / 2


def test_the_last_step_says_what_is_missing_how_sure_it_is_and_how_long_it_takes() -> None:
    evidence = after(Traffic(requests_per_s=20), 40)
    verdict, reason = judge_step(TOLD_PLAN, evidence, elapsed_s=40.0, last=True)
    assert verdict is Verdict.WAIT
    assert re.fullmatch(
        r"waiting for evidence that (p50|p95|p50 and p95) (is|are) slower by at most 20% "
        r"\(bad_margin; (about \d+ (s|min)|less than 10 s) left at this traffic\); it is promoted without you once "
        r"there is enough; `serin rollout promote` promotes it now, `serin rollout abort` ends the rollout",
        reason,
    ), reason


def test_too_little_traffic_is_said_and_not_guessed_from() -> None:
    early = after(Traffic(requests_per_s=20), 8)
    assert (
        "not enough traffic to tell how long it takes"
        in judge_step(TOLD_PLAN, early, elapsed_s=8.0, last=True)[1]
    )


def test_a_candidate_at_the_bad_margin_comes_no_closer() -> None:
    evidence = after(Traffic(requests_per_s=200, slower=1.3), 40)
    assert "at this traffic it does not come closer" in not_proven(TOLD_PLAN, evidence)


@pytest.mark.parametrize(("wins", "target"), [(0.3, 20.0), (0.8, 1e4)])
def test_steady_wins_reach_the_target_in_the_time_that_was_foretold(wins: float, target: float) -> None:
    wealth = start()
    for _ in range(10):
        wealth = bet(wealth, np.asarray(wins))
    left = seconds_until(wealth, wealth / 10, target)
    blocks = 0
    while float(e_value(wealth)) < target:
        wealth, blocks = bet(wealth, np.asarray(wins)), blocks + 1
    assert blocks - 1 < left <= blocks


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "not enough traffic to tell how long it takes"),
        (float("inf"), "at this traffic it does not come closer"),
        (3.0, "less than 10 s left at this traffic"),
        (44.0, "about 40 s left at this traffic"),
        (200.0, "about 3 min left at this traffic"),
        (9000.0, "about 2 h left at this traffic"),
    ],
)
def test_a_wait_is_as_precise_as_it_is_known(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_a_doubt_says_how_often_chance_shows_as_much_and_when_it_is_enough() -> None:
    assert doubt(TOLD_PLAN, "p95", 6.6) == (
        "it looks as if its p95 is slower than allowed (10%); a good version looks like this in at most 30% of "
        "rollouts, it is rolled back at 1%"
    )
    assert TOLD_PLAN.rollback_risk(TOLD_PLAN.rollback_at) == pytest.approx(TOLD_PLAN.false_rollback)
    assert TOLD_PLAN.promotion_risk(TOLD_PLAN.promote_at) == pytest.approx(TOLD_PLAN.false_promotion)
