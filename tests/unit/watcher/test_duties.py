"""The watcher's duties at their own intervals, and the one that reports rollouts that are held."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import StoreUnreachable
from serin.formats.serving.journal import MODELS, Decision, Writer, dump_decision, prefix_of
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.commands import Inbox
from serin.rollout.run.record import rollout2decision
from serin.rollout.run.status import ModelStatus
from serin.store.artifacts import Release
from serin.store.home_objects import HomeObjects
from serin.store.numbered import numbered_key
from serin.store.open import open_objects
from serin.watcher.auto_rollback import AutoRollback
from serin.watcher.duty import Rounds
from serin.watcher.report_duties import RolloutsDuty
from serin.watcher.served import watched_statuses
from tests.fakes.rollout import home_journals
from tests.kit.stacks import stack_in
from tests.kit.waiting import Clock


class Counting:
    def __init__(self, name: str, every_s: float, *, fails: bool = False) -> None:
        self.name, self.every_s, self._fails = name, every_s, fails
        self.ticks = 0

    def tick(self, now: float) -> None:
        self.ticks += 1
        if self._fails:
            raise ValueError("a broken file")

    def close(self) -> None: ...


def test_each_duty_runs_at_its_own_interval() -> None:
    clock, fast, slow = Clock(100.0), Counting("fast", 1.0), Counting("slow", 10.0)
    rounds = Rounds([fast, slow], clock)
    for _ in range(20):
        assert rounds.run(0.0) == pytest.approx(1.0)
        clock.t += 1.0
    assert (fast.ticks, slow.ticks) == (20, 2)


def test_a_failing_duty_is_logged_once_a_minute_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    clock, good = Clock(100.0), Counting("good", 1.0)
    rounds = Rounds([Counting("bad", 1.0, fails=True), good], clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(90):
            rounds.run(0.0)
            clock.t += 1.0
    assert good.ticks == 90
    assert sum("a broken file" in record.getMessage() for record in caplog.records) == 2


def test_a_duty_that_waits_for_a_store_in_vain_leaves_the_recorder_time() -> None:
    clock, recorder = Clock(100.0), Counting("recorder", 3.0)

    class Waiting(Counting):
        def tick(self, now: float) -> None:
            self.ticks += 1
            clock.t += 40.0  # until it gives up
            raise StoreUnreachable(url="s3://somewhere", reason="no answer")

    waiting = Waiting("quality", 5.0)
    rounds = Rounds([recorder, waiting], clock)
    end = clock.t + 1000.0
    while clock.t < end:
        clock.t += max(rounds.run(0.0), 0.1)
    assert waiting.ticks == 10
    assert recorder.ticks >= 200


NOW = 1_800_000_000.0
V1, V2 = (Release(model="flights", version=version) for version in (1, 2))
ROLLOUT = Rollout(
    id="r1", candidate=V2, stable=V1, previous=None,
    plan=Plan(), phase=Phase.SHIFTING, step=0, began=NOW, since=NOW, evidence_from=NOW, reason="gateway b is silent",
)  # fmt: skip


class Scene:
    """`shared`: decisions are in the store, and an agent runs in the home."""

    def __init__(self, home: Path, *, shared: bool) -> None:
        self.home, self.shared, self._seq = home, shared, 0
        self.store = open_objects(os.environ["SERIN_STORE"])
        if shared:
            stack_in(home, agent=True)
        self._duty = RolloutsDuty(home, AlertBook(home))

    def decide(self, hold: Hold | None, phase: Phase = Phase.SHIFTING) -> None:
        self.record(rollout2decision(replace(ROLLOUT, hold=hold, phase=phase), NOW))

    def record(self, decision: Decision) -> None:
        if not self.shared:
            home_journals(self.home).open("flights").append(decision)
            return
        self._seq += 1
        content = dump_decision(replace(decision, seq=self._seq), Writer(holder="c", term=1))
        self.store.put(f"{MODELS}flights.json", b"{}")
        self.store.create(numbered_key(prefix_of("flights"), self._seq), content)

    def look(self, after_s: float) -> tuple[AlertRecord, ...]:
        self._duty.tick(NOW + after_s)
        return read_alerts(self.home, now=NOW + after_s).open


@pytest.fixture(params=["one machine", "several hosts"])
def scene(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "shared"))
    return Scene(home, shared=request.param == "several hosts")


def test_a_held_rollout_is_an_alert_until_it_continues(scene: Scene) -> None:
    scene.decide(None)
    assert scene.look(0) == ()
    scene.decide(Hold.INCONCLUSIVE)
    (found,) = scene.look(10)
    assert (found.alert.key, found.alert.kind, found.alert.release) == (
        "flights/rollout/held", "rollout", "flights-v2",
    )  # fmt: skip
    assert "is held at" in found.alert.title
    assert found.alert.text.startswith("gateway b is silent. `serin rollout resume flights`")
    scene.decide(None)
    assert scene.look(20) == ()


@pytest.mark.parametrize("hold", [hold for hold in Hold if hold.ends_by_itself])
def test_a_hold_that_ends_by_itself_is_reported_when_it_lasts(scene: Scene, hold: Hold) -> None:
    scene.decide(hold)
    assert scene.look(0) == scene.look(50) == ()
    (found,) = scene.look(60)
    assert found.alert.since == NOW
    assert found.alert.facts["hold"] == hold.value
    scene.decide(Hold.PAUSED)
    assert scene.look(70) == (), "somebody is there"


def test_the_end_of_a_rollout_ends_its_alert_also_for_another_watcher(scene: Scene) -> None:
    scene.decide(Hold.APPROVAL)
    (found,) = scene.look(0)
    assert "`serin rollout approve flights` lets it continue" in found.alert.text
    scene.decide(None, Phase.ROLLED_BACK)
    RolloutsDuty(scene.home, AlertBook(scene.home)).tick(NOW + 10)
    assert read_alerts(scene.home, now=NOW + 10).open == ()


def back(scene: Scene, by: str) -> ModelStatus:
    """Version 2 was rolled back to 1 by somebody, and is live again."""
    returned = replace(ROLLOUT, id="r2", candidate=V1, stable=V2, phase=Phase.PENDING, by=by)
    scene.record(rollout2decision(returned, NOW, command="r2"))
    scene.record(rollout2decision(replace(ROLLOUT, id="r3", phase=Phase.PROMOTED), NOW))
    (found,) = watched_statuses(scene.home)
    assert (found.live, found.previous) == (2, 1)
    return found


def test_an_automatic_rollback_is_asked_of_the_controller_that_decides(scene: Scene) -> None:
    model, rollbacks = back(scene, by="ann"), AutoRollback(scene.home)
    assert rollbacks.refusal(model, NOW) is None
    rollbacks.begin(model, why="it burns", by="objectives", now=NOW)
    (asked,) = Inbox(scene.store if scene.shared else HomeObjects(scene.home)).pending()
    assert (asked.kind, asked.version, asked.by) == ("rollback", 1, "objectives")
