from __future__ import annotations

from pathlib import Path

import pytest

from serin.errors import StoreUnreachable
from serin.formats.cluster.desired_state import DesiredState, key_of
from serin.formats.cluster.host_report import AgentReport, ReleaseReport, agent_key
from serin.stack.agent.evidence import EvidenceUpload
from serin.stack.agent.link import Link
from serin.store.objects import FolderObjects, Objects

REPORT = AgentReport(host="a", beat=0, t=0.0, address="a:1", peer="a:2", desired_seq=0, evidence_seq=0)


class Scene:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.objects = FolderObjects(folder / "store")
        self.away = False
        self.news = 0

    def link(self) -> Link:
        upload = EvidenceUpload(
            self._folder / "evidence.json", host="a", request_log=self._folder / "requests.jsonl"
        )
        return Link(
            "a", self._open, kept=self._folder / "desired.json", evidence=upload, on_news=self._on_news
        )

    def write(self, seq: int, **hosts: tuple[str, ...]) -> None:
        desired = DesiredState(seq=seq, term=1, by="c", t=0.0, hosts=hosts)
        self.objects.create(key_of(seq), desired.dump())

    def _open(self) -> Objects:
        if self.away:
            raise StoreUnreachable(url="s3://b", reason="away")
        return self.objects

    def _on_news(self) -> None:
        self.news += 1


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def seq_of(link: Link) -> int | None:
    return link.desired.seq if link.desired else None


def test_the_newest_desired_state_counts(scene: Scene) -> None:
    link = scene.link()
    link.round()
    assert seq_of(link) is None
    for seq in (1, 2, 3):
        scene.write(seq)
    link.round()
    assert (seq_of(link), scene.news) == (3, 1)
    link.round()
    assert scene.news == 1, "nothing new"


def test_the_last_desired_state_outlives_the_agent_while_the_store_is_away(scene: Scene) -> None:
    scene.write(1)
    scene.link().round()
    scene.away = True
    link = scene.link()
    assert seq_of(link) == 1
    with pytest.raises(StoreUnreachable):
        link.round()
    scene.away = False
    scene.write(2)
    link.round()
    assert seq_of(link) == 2


def test_a_desired_state_that_cannot_be_read_changes_nothing(scene: Scene) -> None:
    scene.write(1)
    link = scene.link()
    link.round()
    scene.objects.create(key_of(2), b'{"format": "serin.desired_state", "version": 99}')
    link.round()
    assert seq_of(link) == 1
    scene.write(3)
    link.round()
    assert seq_of(link) == 3


def test_a_store_that_was_replaced_is_followed_from_its_first_state(scene: Scene) -> None:
    scene.write(7)
    link = scene.link()
    link.round()
    scene.objects.remove(key_of(7))
    scene.write(1)
    for _ in range(31):
        link.round()
    assert seq_of(link) == 1


def test_every_report_has_another_beat_also_after_a_restart(scene: Scene) -> None:
    beats = []
    for link in (scene.link(), scene.link()):
        link.tell(REPORT)
        for _ in range(2):
            link.round()
            stored = scene.objects.read(agent_key("a"))
            assert stored is not None
            beats.append(AgentReport.load(stored.content).beat)
    assert len({*beats}) == 4


def test_peers_are_hosts_that_run_something_and_report_it(scene: Scene) -> None:
    scene.write(1, **{"m-v1": ("a", "b")})
    ready = {"m-v1": ReleaseReport(state="ready", verified="")}
    for host in ("a", "b", "stranger"):
        report = AgentReport(
            host=host,
            beat=1,
            t=0.0,
            address="-",
            peer=f"{host}:2",
            desired_seq=1,
            evidence_seq=0,
            releases=ready,
        )
        scene.objects.put(agent_key(host), report.dump())
    link = scene.link()
    assert not link.knows_peers
    link.round()
    assert link.knows_peers
    assert link.peers_of({"m-v1"}) == {"m-v1": ("b:2",)}
    scene.away = True
    assert scene.link().peers_of({"m-v1"}) == {"m-v1": ("b:2",)}, "they outlive the agent, too"
    scene.away = False
    scene.objects.remove(agent_key("b"))
    link.round()
    assert link.peers_of({"m-v1"}) == {"m-v1": ()}
