from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.cluster.agent.evidence import EvidenceUpload
from serin.errors import StoreUnreachable
from serin.formats.cluster.desired_state import DesiredState, EvidenceArm
from serin.formats.cluster.evidence import HostEvidence, key_of
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import Block
from serin.rollout.decide.cutting import Arm, Mark, cut_requests
from serin.rollout.decide.plan import Plan
from serin.store.objects import FolderObjects
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.unit.monitoring.request_lines import line

T0 = 1_700_000_000.0
PLAN = Plan()
ARM = EvidenceArm(
    rollout="r1", candidate=CANDIDATE, stable=STABLE, since_epoch=3, since_t=T0, shares={3: 0.5},
    plan=PLAN.to_json(),
)  # fmt: skip
DESIRED = DesiredState(seq=4, term=1, by="c", t=T0, arms={"flights": ARM})


class Unreliable(FolderObjects):
    """Fails every call in `failing`; `lost`: it writes, and the answer is lost."""

    failing = False
    lost = False

    def create(self, key: str, content: bytes) -> str:
        if self.failing:
            raise StoreUnreachable(url=self.url, reason="away")
        tag = super().create(key, content)
        if self.lost:
            raise StoreUnreachable(url=self.url, reason="away")
        return tag


class Host:
    """A request log that grows, and an agent's upload that is replaced by a new one now and then."""

    def __init__(self, folder: Path, requests: list[Request]) -> None:
        self.log, self._file = folder / "requests.jsonl", folder / "agent" / "evidence.json"
        self.objects = Unreliable(folder / "store")
        self.now = T0
        self._waiting = list(requests)
        self.restart()

    def restart(self) -> None:
        self.upload = EvidenceUpload(self._file, host="a", request_log=self.log, clock=lambda: self.now)

    def step(self, desired: DesiredState = DESIRED, seconds: float = 1.0) -> None:
        self.now += seconds
        with self.log.open("a") as lines:
            while self._waiting and self._waiting[0].t <= self.now:
                lines.write(line(self._waiting.pop(0)))
        self.upload.step(self.objects, desired, desired.seq)

    def uploaded(self) -> list[HostEvidence]:
        keys = self.objects.keys("cluster/evidence/a/")
        return [HostEvidence.load(stored.content) for key in keys if (stored := self.objects.read(key))]

    def forget(self) -> None:
        """Loses the agent's state and what it has uploaded."""
        self._file.unlink()
        for key in self.objects.keys(""):
            self.objects.remove(key)
        self.restart()

    def blocks(self, earlier: Sequence[HostEvidence] = ()) -> dict[int, Block]:
        found: dict[int, Block] = {}
        for evidence in (*earlier, *self.uploaded()):
            for second, content in evidence.models["flights"].blocks:
                block = Block.from_json(content)
                found[second] = found[second] + block if second in found else block
        return found


@pytest.fixture
def requests() -> list[Request]:
    return sorted(Traffic(requests_per_s=40).requests(T0, 12.0), key=lambda request: request.t)


@pytest.fixture
def host(tmp_path: Path, requests: list[Request]) -> Iterator[Host]:
    return Host(tmp_path, requests)


def whole(requests: list[Request]) -> dict[int, Block]:
    """The blocks of a log that was cut at once, by one process."""
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)
    return dict(cut_requests(Mark(), requests, arm=arm, shares={3: 0.5}, plan=PLAN)[1].blocks)


def same(one: dict[int, Block], other: dict[int, Block]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[second].bins, other[second].bins)
        and one[second].to_json() == other[second].to_json()
        for second in one
    )


def test_restarts_and_an_absent_store_neither_repeat_nor_lose_a_second(
    host: Host, requests: list[Request]
) -> None:
    for second in range(28):
        host.objects.failing = second in (5, 6, 7, 14)
        host.objects.lost = second in (9, 18)
        try:
            host.step()
        except StoreUnreachable:
            assert second in (5, 6, 7, 9, 14, 18)
        if second % 3 == 0:
            host.restart()
    assert same(host.blocks(), whole(requests))
    assert [each.seq for each in host.uploaded()] == list(range(1, len(host.uploaded()) + 1))


@pytest.mark.parametrize("counted", [1, 4, 9])
def test_an_agent_that_has_lost_everything_continues_after_what_was_counted(
    host: Host, requests: list[Request], counted: int
) -> None:
    """As on a machine that was restarted: what it reported was in memory."""
    for _ in range(counted):
        host.step()
    kept = host.uploaded()
    for _ in range(2):  # uploaded, and counted by nobody who remembers it
        host.step()
    host.forget()
    last = kept[-1]
    arm = replace(ARM, resume={"a": (last.seq, last.models["flights"].course)})
    desired = replace(DESIRED, arms={"flights": arm})
    while host.now < T0 + 28:
        host.step(desired)
    assert host.uploaded()[0].seq == last.seq + 1
    assert same(host.blocks(kept), whole(requests))


def test_no_block_comes_before_the_second_that_was_called_complete(host: Host) -> None:
    for _ in range(14):
        host.step()
    complete_to = 0
    for evidence in host.uploaded():
        seconds = [second for second, _ in evidence.models["flights"].blocks]
        assert all(second >= complete_to for second in seconds)
        assert evidence.complete_to >= complete_to
        complete_to = evidence.complete_to
    assert complete_to > T0


def test_evidence_is_cut_only_while_a_rollout_gathers_some_and_every_object_names_it(host: Host) -> None:
    quiet = DesiredState(seq=3, term=1, by="c", t=T0)
    host.step(quiet)
    assert host.uploaded() == []
    host.step()
    host.step(DESIRED, seconds=0.0)
    assert [each.models["flights"].rollout for each in host.uploaded()] == ["r1", "r1"]
    assert host.uploaded()[-1].models["flights"].blocks == ()
    assert host.uploaded()[-1].models["flights"].newest > T0
    host.step(quiet)
    assert len(host.uploaded()) == 2


def test_a_rollout_that_gathers_evidence_again_continues_where_it_was(
    host: Host, requests: list[Request]
) -> None:
    quiet = DesiredState(seq=3, term=1, by="c", t=T0)
    for second in range(14):
        host.step(quiet if 4 < second < 9 else DESIRED)
    assert same(host.blocks(), whole(requests))


def test_latencies_before_the_first_weight_epoch_are_sent_apart(host: Host) -> None:
    later: Any = {
        **{name: getattr(ARM, name) for name in ARM.__slots__},
        "since_epoch": 4,
        "shares": {4: 0.5},
    }
    desired = DesiredState(seq=5, term=1, by="c", t=T0, arms={"flights": EvidenceArm(**later)})
    host.step(desired)
    (found,) = host.uploaded()
    assert found.models["flights"].blocks == ()
    assert found.models["flights"].before is not None
    assert found.models["flights"].since_epoch == 4


def test_a_home_that_was_lost_continues_after_what_its_host_had_uploaded(host: Host, tmp_path: Path) -> None:
    for _ in range(3):
        host.step()
    (tmp_path / "agent" / "evidence.json").unlink()
    host.restart()
    host.step()
    assert [each.seq for each in host.uploaded()] == [1, 2, 3, 4]
    (tmp_path / "agent" / "evidence.json").write_text("{")
    host.restart()
    host.step()
    assert host.upload.seq == 5


def test_objects_are_removed_after_an_hour(host: Host) -> None:
    for _ in range(3):
        host.step()
    host.now += 3600.0
    host.step()
    assert [each.seq for each in host.uploaded()] == [4]
    assert host.objects.read(key_of("a", 1)) is None
