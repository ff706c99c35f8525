from dataclasses import replace
from pathlib import Path

import pytest

from serin.cluster.agent.link import Link
from serin.cluster.agent.replays import Replays
from serin.cluster.shared_keys import KEY, SharedKeys
from serin.errors import HostNameTaken, KeyFileBroken, StoreUnreachable
from serin.formats.cluster.desired_state import DesiredState, key_of
from serin.formats.cluster.host_report import AgentReport, ReleaseReport, agent_key
from serin.serving.envoy.keys import KeyFile
from serin.store.objects import FolderObjects, Objects

REPORT = AgentReport(host="a", beat=0, t=0.0, address="a:1", peer="a:2", desired_seq=0, evidence_seq=0)


class Scene:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.objects = FolderObjects(folder / "store")
        self.keys = KeyFile(path=folder / "keys.json")
        self.away = False
        self.news = 0

    def link(self) -> Link:
        return Link(
            "a",
            self._open,
            folder=self._folder,
            request_log=self._folder / "requests.jsonl",
            replays=Replays(self._folder, "a", {}.__getitem__),
            keys=self.keys,
            on_news=self._on_news,
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
            beats.append(AgentReport.load(stored.content).beat)
    assert len({*beats}) == 4


def test_peers_are_hosts_that_run_something_and_report_it(scene: Scene) -> None:
    scene.write(1, **{"m-v1": ("a", "b")})
    ready = {"m-v1": ReleaseReport(state="ready", verified="")}
    for host in ("b", "stranger"):
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


def rounds(link: Link, count: int) -> list[bool]:
    """Runs rounds; says of each whether this agent has the host's name."""
    found = []
    for _ in range(count):
        try:
            link.round()
            found.append(True)
        except HostNameTaken:
            found.append(False)
    return found


def other(scene: Scene, tmp_path: Path, *, address: str = "elsewhere:1") -> Link:
    """A link of another home with the same host name and the same store."""
    second = Scene(tmp_path / "other")
    second.objects = scene.objects
    link = second.link()
    link.tell(replace(REPORT, address=address))
    return link


def reported(scene: Scene) -> str:
    stored = scene.objects.read(agent_key("a"))
    return AgentReport.load(stored.content).address


def test_of_two_agents_with_one_name_the_second_is_refused_and_follows_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    first, second = scene.link(), other(scene, tmp_path)
    first.tell(REPORT)
    first.round()
    scene.write(1)
    for _ in range(20):
        assert rounds(first, 1) == [True]
        assert rounds(second, 1) == [False]
    assert (seq_of(first), seq_of(second), reported(scene)) == (1, None, REPORT.address)
    with pytest.raises(
        HostNameTaken, match="another agent, with the gateway a:1, reports as host a; set SERIN_HOST"
    ):
        second.round()


def test_two_agents_that_begin_at_once_never_write_by_turns(scene: Scene, tmp_path: Path) -> None:
    links = scene.link(), other(scene, tmp_path)
    links[0].tell(REPORT)
    for link in links:
        link._own.claim(scene.objects)  # both find no report
    for _ in range(3):  # the one that is refused in the meantime looks again
        had = [rounds(link, 1)[0] for link in links]
    assert had == [True, False]
    writers = {(*(rounds(link, 1)[0] for link in links), reported(scene)) for _ in range(20)}
    assert writers == {(True, False, REPORT.address)}


def test_a_name_is_free_once_its_agent_is_silent_and_the_one_that_returns_is_refused(
    scene: Scene, tmp_path: Path
) -> None:
    first, second = scene.link(), other(scene, tmp_path)
    first.tell(REPORT)
    first.round()
    assert rounds(second, 7) == [False] * 5 + [True] * 2
    for _ in range(10):
        assert rounds(second, 1) == [True]
        assert rounds(first, 1) == [False]
    assert reported(scene) == "elsewhere:1"


@pytest.mark.parametrize("kept", [True, False])
def test_a_restarted_agent_has_its_name_at_once_and_after_a_loss_of_its_disk_soon(
    scene: Scene, tmp_path: Path, kept: bool
) -> None:
    link = scene.link()
    link.tell(REPORT)
    link.round()
    if not kept:
        (tmp_path / "report_tag").unlink()
    assert rounds(scene.link(), 6) == ([True] * 6 if kept else [False] * 5 + [True])


def test_a_forgotten_host_that_runs_reports_again(scene: Scene) -> None:
    link = scene.link()
    link.tell(REPORT)
    link.round()
    scene.objects.remove(agent_key("a"))
    assert rounds(link, 2) == [True, True]
    assert reported(scene) == REPORT.address


def test_keys_that_are_changed_on_one_host_are_those_of_all(scene: Scene, tmp_path: Path) -> None:
    other = KeyFile(path=tmp_path / "other" / "keys.json")
    link, changing = scene.link(), SharedKeys(scene.objects, other)
    link.round()
    assert scene.keys.read().keys == ()
    changing.change(lambda keys: keys.create("ada"))
    before = scene.news
    link.round()
    link.round()
    assert scene.keys.read() == other.read()
    assert (scene.news, scene.keys.read().required) == (before + 1, True)
    SharedKeys(scene.objects, scene.keys).change(lambda keys: keys.create("bob"))
    changing.change(lambda keys: keys.revoke("ada"))
    assert [(key.name, key.revoked is None) for key in other.read().keys] == [("ada", False), ("bob", True)]
    changing.change(lambda keys: keys.require(False))
    link.round()
    assert not scene.keys.read().required
    scene.keys.path.unlink()
    link.round()
    assert scene.keys.read() == other.read(), "a file that was lost is copied again"


def test_of_two_changes_at_once_none_is_lost(scene: Scene, tmp_path: Path) -> None:
    here = SharedKeys(scene.objects, scene.keys)
    there = SharedKeys(scene.objects, KeyFile(path=tmp_path / "other" / "keys.json"))
    here.change(lambda keys: keys.create("first"))
    others = ["meanwhile"]

    def slowly(keys: KeyFile) -> None:
        if others:
            there.change(lambda keys: keys.create(others.pop()))
        keys.create("slow")

    here.change(slowly)
    assert [key.name for key in scene.keys.read().keys] == ["first", "meanwhile", "slow"]


def test_what_is_not_a_ring_of_keys_changes_no_host(scene: Scene) -> None:
    SharedKeys(scene.objects, scene.keys).change(lambda keys: keys.create("ada"))
    link, ring = scene.link(), scene.keys.read()
    scene.objects.put(KEY, b"{}x")
    with pytest.raises(KeyFileBroken, match=r"cluster/keys\.json is not a ring"):
        link.round()
    assert scene.keys.read() == ring
