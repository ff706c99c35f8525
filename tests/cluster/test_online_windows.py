"""Online windows on three hosts: gateways of different hosts read one state in Valkey, and write it once."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serin.errors import RowsUnfit
from serin.host.supervisor import Supervisor
from serin.host.windows import WINDOWS
from serin.monitoring.capture.read import captured
from serin.rollout.decide.state import Phase
from serin.serving.client.client import Client
from serin.store.artifacts import Release
from tests.cluster.events_server import EventsServer
from tests.cluster.namespaces import Host, end
from tests.cluster.part import need
from tests.cluster.serving_hosts import MODEL, cluster
from tests.cluster.test_rollout_hosts import AT_ONCE, SPEC, Scene
from tests.fakes.counting_plan import BIAS, PLAN, count_of, event_inputs
from tests.kit.web import ask
from tests.signals import hit

pytestmark = pytest.mark.timeout(2400)  # a busy machine takes its time; each wait has its own limit
RECORDED = f"{SPEC}monitoring: {{capture: {{share: 1.0}}}}\n"


class Windows(Scene):
    server: EventsServer

    def answer(self, host: str, event: str, at: int | None = None) -> tuple[int, str]:
        return self.cluster.members[host].ask(event_inputs(event, at))

    def earlier(self, host: str, event: str, at: int | None = None) -> int:
        """How many events the model saw."""
        status, text = self.answer(host, event, at)
        assert status == 200, text
        (score,) = json.loads(text)["outputs"][0]["data"]
        return count_of(score)


@pytest.fixture(scope="module")
def scene() -> Iterator[Windows]:
    need("namespaces")
    need("valkey")
    folder = Path(tempfile.mkdtemp(prefix="serin-windows-"))
    servers: list[EventsServer] = []

    def start_server(ends: ExitStack, host: Host) -> Any:
        server = EventsServer(folder / "events", host=host, port=host.free_port())
        server.start()
        ends.callback(server.close)
        servers.append(server)
        return server.variables

    try:
        with cluster(folder, "a", "b", "c", prefix="198.18.46", beside=start_server) as made:
            found = Windows(made, [])
            found.server = servers[0]
            controller = found.start_controller()
            try:
                yield found
            finally:
                end(controller)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def live(scene: Windows) -> Release:
    release = scene.cluster.publish(BIAS, RECORDED, extra={"windows.json": PLAN.dump()})
    scene.cluster.until(lambda: all(scene.cluster.report(name) for name in "abc"), what="all hosts report")
    scene.start(release, AT_ONCE)
    scene.until(release, lambda now: now.phase is Phase.PROMOTED, what="the first version")
    scene.cluster.until(lambda: all(_answers(scene, name) for name in "abc"), what="windows on all hosts")
    return release


def _answers(scene: Windows, host: str) -> bool:
    """Whether the gateway has the route and its step runs. An event without an id is counted nowhere."""
    return scene.answer(host, "")[0] == 200


def test_gateways_of_three_hosts_read_one_state_and_write_it_once(scene: Windows, live: Release) -> None:
    seen = [scene.earlier("abc"[n % 3], f"first {n}") for n in range(9)]
    assert seen == list(range(9))
    at = time.time_ns() // 1000
    assert [scene.earlier(host, "again", at) for host in "abc"] == [9, 9, 9]
    member = scene.cluster.members["b"]
    event = {"id": "pushed", "at": time.time_ns() // 1000, "carrier": "AA"}
    with member.host.inside():
        pushed = ask(
            f"{member.host.address}:{member.port}", f"/v2/models/{MODEL}/events", {"events": [event, event]}
        )
    assert (pushed.status, json.loads(pushed.text)) == (200, {"counted": 1, "repeated": 1})
    assert scene.earlier("c", "after the push") == 11
    shown = json.loads(scene.cluster.members["a"].serin("events", "show", "--json").stdout)
    assert shown["keys"] == 1


def test_a_client_learns_from_the_gateway_what_to_send(scene: Windows, live: Release) -> None:
    before, member = scene.earlier("a", "before the client"), scene.cluster.members["b"]
    rows = {
        "at": [datetime.now(UTC)] * 2, "id": ["client 1", "client 2"], "carrier": ["AA", "AA"], "temp": [0.5, 0.5],
        "night": [False, False],
    }  # fmt: skip
    with member.host.inside(), Client(f"http://{member.host.address}:{member.port}", MODEL) as client:
        scores = client.predict(rows)["score"].ravel()
        with pytest.raises(RowsUnfit, match="'carrier'"):
            client.predict({name: values for name, values in rows.items() if name != "carrier"})
    assert [count_of(score) for score in scores] == [
        before + 1,
        before + 1,
    ]  # of equal times, neither is earlier


def test_recorded_requests_hold_the_windows_that_were_used(scene: Windows, live: Release) -> None:
    home = scene.cluster.members["c"].home
    last = scene.earlier("c", "recorded")

    def recorded() -> list[int]:
        found = captured(home, MODEL, columns=["distance"])
        return found["distance"].to_pylist() if "distance" in found.column_names else []  # nothing yet

    scene.cluster.until(lambda: last in recorded(), within_s=120.0, what="the request in the records of c")


def test_requests_are_refused_while_the_server_is_away_and_no_event_is_lost(
    scene: Windows, live: Release
) -> None:
    before = scene.earlier("a", "before")
    scene.server.kill()
    for host in "abc":
        status, text = scene.answer(host, f"away {host}")
        assert (status, "windows of this request" in text) == (503, True)
    scene.server.start()
    scene.cluster.until(lambda: all(_answers(scene, name) for name in "abc"), what="windows on all hosts")
    assert [scene.earlier(host, f"back {host}") for host in "abc"] == [before + n for n in (1, 2, 3)]


def test_a_step_that_is_killed_comes_back_with_the_events_of_all(scene: Windows, live: Release) -> None:
    before = scene.earlier("a", "before the kill")
    member = scene.cluster.members["b"]
    pids = {child.name: child.pid for child in Supervisor(member.home).children()}
    hit(pids[WINDOWS] or 0)
    scene.cluster.until(lambda: _answers(scene, "b"), what="the step of b")
    assert scene.earlier("b", "after the kill") == before + 1


def test_the_password_is_in_no_log_and_no_argument(scene: Windows, live: Release) -> None:
    secret = scene.server.password
    for member in scene.cluster.members.values():
        for log in member.home.glob("logs/*"):
            assert secret not in log.read_text(errors="replace"), log
        for pid in filter(None, member.pids().values()):
            assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_forgotten_rows_take_the_events_of_their_keys_along(scene: Windows, live: Release) -> None:
    assert scene.earlier("a", "before it is forgotten") > 0
    member = scene.cluster.members["a"]

    def forgotten() -> bool:
        member.serin("captures", "forget", MODEL, "--where", "carrier = 'AA'", "--yes", check=False)
        return scene.earlier("c", f"after {time.time_ns()}") <= 1  # requests of this loop are events, too

    scene.cluster.until(forgotten, within_s=240.0, what="no events of the carrier")
