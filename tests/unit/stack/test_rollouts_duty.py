"""A rollout that is held is reported until it continues, on one machine and on hosts that share a store."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from serin.formats.cluster.decisions import MODELS, Writer, dump_decision, prefix_of
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.alerts.read import read_alerts
from serin.monitoring.alerts.records import AlertRecord
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.record import JournalFolder, rollout2decision
from serin.stack.host.state import Stack, write_stack
from serin.stack.watch.rollouts_duty import RolloutsDuty
from serin.store.artifacts import Release
from serin.store.numbered import numbered_key
from serin.store.objects import open_objects

NOW = 1_800_000_000.0
ROLLOUT = Rollout(
    id="r1", candidate=Release(model="flights", version=2), stable=Release(model="flights", version=1), previous=None,
    plan=Plan(), phase=Phase.SHIFTING, step=0, began=NOW, since=NOW, evidence_from=NOW, reason="gateway b is silent",
)  # fmt: skip


class Scene:
    """`shared`: decisions are in the store, and an agent runs in the home."""

    def __init__(self, home: Path, *, shared: bool) -> None:
        self.home, self._shared, self._seq = home, shared, 0
        self._store = open_objects(os.environ["SERIN_STORE"])
        if shared:
            home.mkdir(exist_ok=True)
            stack = Stack(
                home=home, supervisor_pid=1, supervisor_ticks=1, gateway_port=1, prefect_api_url="",
                prefect_port=None, since=0.0, agent=True,
            )  # fmt: skip
            write_stack(stack)
        self._duty = RolloutsDuty(home, AlertBook(home))

    def decide(self, hold: Hold | None, phase: Phase = Phase.SHIFTING) -> None:
        decision = rollout2decision(replace(ROLLOUT, hold=hold, phase=phase), NOW)
        if not self._shared:
            with JournalFolder(self.home).open("flights") as journal:
                journal.append(decision)
            return
        self._seq += 1
        content = dump_decision(replace(decision, seq=self._seq), Writer(holder="c", term=1))
        self._store.put(f"{MODELS}flights.json", b"{}")
        self._store.create(numbered_key(prefix_of("flights"), self._seq), content)

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
