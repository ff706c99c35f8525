"""One machine as a cluster of one host: its agent's steps over the objects of the home."""

import logging
from pathlib import Path

import pytest

from serin.cluster.home_controller import HOST, OnlyHost
from serin.cluster.hosts import Hosts
from serin.formats.cluster.desired_state import DesiredState, EvidenceArm, key_of
from serin.host.wiring import request_log
from serin.machine.in_memory import remove_sockets
from serin.rollout.decide.plan import Plan
from serin.store.artifacts import ModelRoute
from serin.store.home_objects import HomeObjects
from tests.fakes.rollout import FakeFleet
from tests.unit.cluster.agent.test_agent import V1, FakeGateway

ARM = EvidenceArm(
    rollout="r", candidate="m-v2", stable="m-v1", since_epoch=1, since_t=0.0, shares={1: 0.5},
    plan=Plan().to_json(),
)  # fmt: skip


def want(objects: HomeObjects, seq: int, **changes: object) -> None:
    hosts = {V1.name: (HOST,)}
    routes = (ModelRoute(model="m", epoch=seq, stable=V1),)
    state = DesiredState(seq=seq, term=1, by="c", t=0.0, hosts=hosts, routes=routes, **changes)  # type: ignore[arg-type]
    objects.create(key_of(seq), state.dump())


def test_a_step_has_its_effect_at_once_also_while_no_evidence_can_be_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So a controller beside it can go back to the live release, and says why it waits for evidence."""
    objects, gateway, fleet = HomeObjects(tmp_path), FakeGateway(), FakeFleet()
    host = OnlyHost(tmp_path, objects, gateway, fleet)  # type: ignore[arg-type]
    try:
        want(objects, 1)
        assert [host.step() for _ in range(2)][-1]
        request_log(tmp_path).mkdir(parents=True)  # it cannot be read
        want(objects, 2, arms={"m": ARM})
        with caplog.at_level(logging.WARNING):
            assert not any(host.step() for _ in range(3))
        assert caplog.text.count("the agent of this machine") == 1, "the same problem is logged once"
        assert [each.epoch for each in gateway.applied[-1]["routes"]] == [2]
        hosts = Hosts(objects, lambda: 0.0)
        hosts.refresh()
        assert hosts.reports[HOST].desired_seq == 2, "the controller knows that it is in force"
        request_log(tmp_path).rmdir()
        assert host.step()
    finally:
        host.close()
        remove_sockets(tmp_path)
