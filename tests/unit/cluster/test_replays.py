"""Replays of recorded requests by several hosts: asked for by the controller, run and reported by agents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from serin.cluster.agent import replays
from serin.cluster.agent.replays import Replays
from serin.cluster.desired import DesiredStates
from serin.cluster.hosts import Hosts
from serin.cluster.shadow.process import Job
from serin.cluster.shadow.replayer import Replayer
from serin.errors import ReleaseNotReady, ReplayEnded, StoreUnreachable
from serin.formats.cluster.host_report import AgentReport, agent_key
from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.state import Rollout
from serin.rollout.run.leadership import HomeLock
from serin.serving.external import External
from serin.store.artifacts import Endpoint, Release
from serin.store.objects import FolderObjects
from serin.store.store import Store
from tests.unit.serving import bundles

LIVE = Release(model=bundles.MODEL, version=1)
ROLLOUT = Rollout(
    id="r", candidate=replace(LIVE, version=2), stable=LIVE, previous=None, began=0.0, since=0.0,
    plan=Plan(shadow=ShadowPlan(rows=10)), evidence_from=0.0,
)  # fmt: skip


class Sender:
    """A fake of the process of a replay: reports what a test gives it."""

    begun: ClassVar[list[Sender]] = []

    def __init__(self, job: Job) -> None:
        self.job, self.reports, self.ended, self.stopped = job, list[Mapping[str, Any]](), False, False
        Sender.begun.append(self)

    def take(self) -> list[Mapping[str, Any]]:
        found, self.reports = self.reports, []
        if self.ended and not found:
            raise ReplayEnded(reason="its process exited")
        return found

    def stop(self) -> None:
        self.stopped = True


class Shaky(FolderObjects):
    away = False

    def put(self, key: str, content: bytes) -> None:
        if self.away:
            raise StoreUnreachable(url=self.url, reason="away")
        super().put(key, content)


class Scene:
    """A controller's replayer, and the agents of hosts that report."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.objects, self._store = Shaky(folder / "objects"), Store(str(folder / "store"))
        for _ in range(2):
            bundles.publish(self._store, bias=0.0, spec="monitoring: {capture: {share: 1}}\n")
        self.hosts = Hosts(self.objects, time.monotonic)
        for host in hosts:
            report = AgentReport(
                host=host, beat=1, t=0.0, address="-", peer="-", desired_seq=0, evidence_seq=0
            )
            self.objects.put(agent_key(host), report.dump())
        self.hosts.refresh()
        lock = HomeLock(folder)
        self.desired = DesiredStates(self.objects, lock, lock.term, time.time)
        self.desired.change(hosts={ROLLOUT.candidate.name: hosts})
        self.scheduled: Endpoint | None = None
        self.replayer = Replayer(
            self.objects,
            self.desired,
            self.hosts,
            self._store,
            External(self._store),
            lambda _: self.scheduled,
        )
        self.agents = {host: Replays(folder, host, self._endpoint) for host in hosts}

    def _endpoint(self, release: Release) -> Endpoint:
        return Endpoint(http=f"127.0.0.1:{release.version}", grpc="-")

    def step(self) -> None:
        for agent in self.agents.values():
            agent.step(self.objects, self.desired.state)

    def sender(self, index: int) -> Sender:
        return Sender.begun[index]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    Sender.begun = []
    monkeypatch.setattr(replays, "ReplayProcess", Sender)
    return Scene(tmp_path, "a", "b")


def batch(until: str) -> dict[str, Any]:
    return {"requests": 1, "place": {"until": until}}


def test_each_host_sends_its_own_records_and_continues_at_its_own_place(scene: Scene) -> None:
    replay = scene.replayer.start(ROLLOUT, {"a": {"until": "7"}})
    scene.step()
    assert [(each.job.address, each.job.place) for each in Sender.begun] == [
        ("127.0.0.1:2", {"until": "7"}), ("127.0.0.1:2", {}),
    ]  # fmt: skip
    scene.sender(1).reports = [batch("1"), batch("2")]
    scene.step()
    assert [each["place"] for each in replay.take()] == [
        {"a": {"until": "7"}, "b": {"until": "1"}}, {"a": {"until": "7"}, "b": {"until": "2"}},
    ]  # fmt: skip
    assert replay.take() == [], "each report is read once"
    scene.sender(0).reports = [batch("8")]
    scene.step()
    assert [each["place"] for each in replay.take()] == [{"a": {"until": "8"}, "b": {"until": "2"}}]


def test_reports_wait_for_a_store_that_is_away(scene: Scene) -> None:
    replay = scene.replayer.start(ROLLOUT, {})
    scene.step()
    scene.sender(0).reports = [batch("1")]
    scene.objects.away = True
    with pytest.raises(StoreUnreachable):
        scene.step()
    scene.objects.away = False
    scene.step()
    assert [each["place"] for each in replay.take()] == [{"a": {"until": "1"}}]


def test_a_replay_waits_only_while_all_of_its_hosts_do(scene: Scene) -> None:
    replay = scene.replayer.start(ROLLOUT, {})
    scene.step()
    for index, passed_on in ((0, 0), (1, 1)):
        scene.sender(index).reports = [{"waiting": "nothing recorded"}]
        scene.step()
        assert len(replay.take()) == passed_on
    scene.sender(0).reports = [batch("1")]
    scene.sender(1).reports = [{"waiting": "nothing recorded"}]
    scene.step()
    assert ["place" in each for each in replay.take()] == [True], "one of them sends"


def test_it_has_ended_when_no_host_sends_any_more(scene: Scene) -> None:
    replay = scene.replayer.start(ROLLOUT, {})
    scene.step()
    scene.sender(0).ended = True
    scene.step()
    assert replay.take() == []
    scene.sender(1).ended = True
    scene.step()
    with pytest.raises(ReplayEnded, match="its process exited"):
        replay.take()


def test_a_replay_that_is_stopped_leaves_nothing_and_a_new_one_replaces_the_last(scene: Scene) -> None:
    first = scene.replayer.start(ROLLOUT, {})
    scene.step()
    again = scene.replayer.start(ROLLOUT, {})
    scene.step()
    assert [each.stopped for each in Sender.begun] == [True, True, False, False]
    first.stop()
    assert scene.desired.state.replays, "the one that replaced it stays"
    scene.sender(2).reports = [batch("1")]
    scene.step()
    again.stop()
    scene.step()
    assert all(each.stopped for each in Sender.begun)
    assert not scene.desired.state.replays
    assert not scene.objects.keys("cluster/replays/")


def test_no_replay_begins_while_no_host_with_the_candidate_reports(scene: Scene) -> None:
    scene.desired.change(hosts={ROLLOUT.candidate.name: ("c",)})
    with pytest.raises(ReplayEnded, match="no host"):
        scene.replayer.start(ROLLOUT, {})


def test_a_candidate_that_a_scheduler_runs_is_called_by_every_host(scene: Scene) -> None:
    scene.desired.change(hosts={})
    scene.scheduled = Endpoint(http="flights-v2.pods:8000", grpc="-")
    scene.replayer.start(ROLLOUT, {})
    scene.step()
    assert [each.job.address for each in Sender.begun] == ["flights-v2.pods:8000"] * 2


def test_a_host_whose_candidate_has_no_address_says_so(scene: Scene) -> None:
    def gone(release: Release) -> Endpoint:
        raise ReleaseNotReady(release=release.name, reason="it was stopped", log="-")

    scene.agents = {"a": Replays(Path(), "a", gone), "b": Replays(Path(), "b", gone)}
    replay = scene.replayer.start(ROLLOUT, {})
    scene.step()
    with pytest.raises(ReplayEnded, match="it was stopped"):
        replay.take()
