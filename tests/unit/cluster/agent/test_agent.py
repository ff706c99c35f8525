from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from serin.cluster.agent.agent import Agent
from serin.cluster.agent.settings import AgentSettings
from serin.errors import GatewayRejected, StackUnusable, StoreUnreachable, SupervisorGone
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport
from serin.rollout.run.verification import run
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.fakes.rollout import FakeClock, FakeFleet

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
SETTINGS = AgentSettings(host="a", address="10.0.0.1", port=8080, advertise="10.0.0.1", peer_port=8443)
ROUTE = ModelRoute(model="m", epoch=1, stable=V1)


@dataclass
class FakeGateway:
    applied: list[dict[str, Any]] = field(default_factory=list)
    active: dict[str, int] = field(default_factory=dict)
    arriving: int = 0
    refusing: bool = False

    def apply(
        self,
        routes: Sequence[ModelRoute],
        endpoints: Mapping[str, Endpoint],
        timeouts: Mapping[str, Timeouts] | None = None,
        *,
        peers: Mapping[str, Sequence[str]] | None = None,
        leaving: Collection[str] = (),
        waiting: Collection[str] = (),
        missing: Collection[str] = (),
    ) -> None:
        if self.refusing:
            raise GatewayRejected(what="new routes", reason="refusing")
        self.applied.append(
            {
                "routes": list(routes),
                "endpoints": {*endpoints},
                "timeouts": timeouts,
                "peers": dict(peers or {}),
                "leaving": {*leaving},
                "behind": ([*waiting], [*missing]),
            }
        )

    def active_requests(self, release: Release) -> int:
        return self.active.get(release.name, 0)

    def arriving_requests(self) -> int:
        return self.arriving

    def longest_request_s(self) -> float:
        return 5.0


@dataclass
class FakeLink:
    desired: DesiredState | None = None
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    knows_peers: bool = True
    told: list[AgentReport] = field(default_factory=list)

    def peers_of(self, releases: set[str]) -> dict[str, tuple[str, ...]]:
        return {name: self.peers.get(name, ()) for name in releases}

    def others_of(self, desired: DesiredState) -> dict[str, tuple[str, ...]]:
        del desired
        return {}

    def tell(self, report: AgentReport) -> None:
        self.told.append(report)

    def want(self, *routes: ModelRoute, **hosts: tuple[str, ...]) -> None:
        seq = self.desired.seq + 1 if self.desired else 1
        limits = {"m": {"request_s": 4.0, "of_the_future": 1}}
        self.desired = DesiredState(
            seq=seq, term=1, by="c", t=0.0, routes=routes, hosts=hosts, timeouts=limits
        )


def at_once(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    run(work, future)
    return future


class Scene:
    def __init__(self, settings: AgentSettings = SETTINGS) -> None:
        self.fleet, self.gateway, self.link, self.clock = FakeFleet(), FakeGateway(), FakeLink(), FakeClock()
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        fleet = None if self._settings.gateway_only else self.fleet
        self.agent = Agent(
            self._settings,
            gateway=self.gateway,
            fleet=fleet,
            link=self.link,
            beside=at_once,
            clock=self.clock.steady,
        )

    def tick(self, times: int = 1) -> AgentReport:
        for _ in range(times):
            self.clock.t += 1.0
            found = self.agent.tick()
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_host_starts_verifies_routes_and_reports_what_is_desired(scene: Scene) -> None:
    assert scene.tick().releases == {}
    scene.link.want(**{"m-v1": ("a",), "m-v2": ("b",)})
    report = scene.tick(5)
    assert scene.fleet.starts == ["m-v1"]
    found = report.releases["m-v1"]
    assert (found.state, found.instance, found.verified) == ("ready", scene.fleet.instance(V1), "")
    assert {*report.releases} == {"m-v1"}
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    report = scene.tick()
    assert (report.desired_seq, report.peer, report.address) == (2, "10.0.0.1:8443", "10.0.0.1:8080")
    assert scene.gateway.applied[-1]["routes"] == [ROUTE]
    assert scene.gateway.applied[-1]["timeouts"] == {"m": Timeouts(request_s=4.0)}


def test_a_restarted_agent_touches_nothing_that_runs_as_desired(scene: Scene) -> None:
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    scene.tick(5)
    before = scene.fleet.instance(V1)
    scene.restart()
    report = scene.tick(3)
    assert (scene.fleet.starts, scene.fleet.stops) == (["m-v1"], [])
    assert (report.releases["m-v1"].instance, report.releases["m-v1"].verified) == (before, "")


def test_an_agent_that_knows_no_desired_state_stops_nothing(scene: Scene) -> None:
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    scene.tick(5)
    scene.link.desired = None
    scene.restart()
    assert scene.tick(5).releases["m-v1"].state == "ready"
    assert scene.fleet.stops == []


def test_a_release_of_which_golden_rows_are_wrong_is_reported_and_another_process_checked_again(
    scene: Scene,
) -> None:
    scene.fleet.wrong = {"m-v1"}
    scene.link.want(**{"m-v1": ("a",)})
    assert "score 0.1 instead of 0.9" in (scene.tick(5).releases["m-v1"].verified or "")
    scene.fleet.wrong = set()
    scene.fleet.restart(V1)
    assert scene.tick(2).releases["m-v1"].verified == ""


def test_golden_rows_that_cannot_be_read_say_nothing_about_the_release(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Release) -> None:
        raise StoreUnreachable(url="s3://b", reason="away")

    scene.link.want(**{"m-v1": ("a",)})
    with monkeypatch.context() as patched:
        patched.setattr(scene.fleet, "verify", away)
        assert scene.tick(6).releases["m-v1"].verified is None
    assert scene.tick(8).releases["m-v1"].verified == ""


def test_a_release_that_cannot_be_started_says_why(scene: Scene) -> None:
    scene.fleet.broken = {"m-v1"}
    scene.link.want(**{"m-v1": ("a",), "m-v2": ("a",)})
    report = scene.tick(5)
    assert "broken" in report.releases["m-v1"].problem
    assert report.releases["m-v2"].state == "ready"


def test_what_is_not_desired_any_more_is_drained_and_then_stopped(scene: Scene) -> None:
    scene.link.want(ROUTE, **{"m-v1": ("a",), "m-v2": ("a",)})
    scene.tick(5)
    scene.gateway.active = {"m-v2": 1}
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    scene.tick(5)
    assert scene.gateway.applied[-1]["leaving"] == {"m-v2"}
    assert scene.fleet.stops == []
    scene.gateway.arriving = 2
    assert scene.tick().arriving_requests == 2
    scene.gateway.active = {}
    scene.tick(5)
    assert scene.fleet.stops == [], "what is still being received may be for it"
    scene.gateway.arriving = 0
    scene.tick(3)
    assert scene.fleet.stops == ["m-v2"]
    assert scene.gateway.applied[-1]["endpoints"] == {"m-v1"}


def test_a_refused_table_leaves_the_earlier_state_in_force_and_says_why(scene: Scene) -> None:
    scene.link.want(ROUTE, **{"m-v1": ("a",), "m-v2": ("a",)})
    scene.tick(5)
    scene.gateway.refusing = True
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    report = scene.tick(90)
    assert (report.desired_seq, scene.fleet.stops) == (1, []), "it may still get requests"
    assert "refusing" in report.problem
    scene.gateway.refusing = False
    report = scene.tick(3)
    assert (report.desired_seq, report.problem, scene.fleet.stops) == (2, "", ["m-v2"])


def test_a_host_without_the_release_routes_to_its_peers(scene: Scene) -> None:
    scene.link.peers = {"m-v1": ("10.0.0.2:8443",)}
    scene.link.want(ROUTE, **{"m-v1": ("b",)})
    assert scene.tick().desired_seq == 1
    assert scene.gateway.applied[-1]["peers"] == {"m-v1": ("10.0.0.2:8443",)}
    assert scene.fleet.starts == []


def test_a_supervisor_that_is_gone_does_not_end_the_agent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.link.want(ROUTE, **{"m-v1": ("a",)})
    scene.tick(5)

    def gone() -> list[Release]:
        raise SupervisorGone(socket="s", reason="gone")

    monkeypatch.setattr(scene.fleet, "running", gone)
    applied = len(scene.gateway.applied)
    report = scene.tick(3)
    assert (report.releases["m-v1"].state, report.problem != "") == ("ready", True), "the last that was seen"
    assert (len(scene.gateway.applied), scene.fleet.stops) == (applied, [])


def test_an_agent_that_begins_without_the_store_keeps_the_routes_to_peers_it_does_not_know(
    scene: Scene,
) -> None:
    scene.link.knows_peers = False
    scene.link.want(ROUTE, **{"m-v1": ("b",)})
    assert "m-v1" in scene.tick().problem
    assert scene.gateway.applied == []
    scene.link.knows_peers, scene.link.peers = True, {"m-v1": ("10.0.0.2:8443",)}
    scene.tick()
    assert scene.gateway.applied[-1]["routes"] == [ROUTE]


def test_a_gateway_alone_routes_to_the_addresses_of_the_desired_state() -> None:
    scene = Scene(AgentSettings(host="pod", address="0.0.0.0", port=8080, advertise="pod", gateway_only=True))
    place = Endpoint(http="m-v1.serin:8000", grpc="m-v1.serin:8001")
    scene.link.desired = DesiredState(
        seq=3, term=1, by="c", t=0.0, routes=(ROUTE,), endpoints={"m-v1": place}, hosts={"m-v2": ("pod",)}
    )
    report = scene.tick()
    assert (report.desired_seq, report.peer, report.releases) == (3, None, {})
    assert scene.gateway.applied[-1]["endpoints"] == {"m-v1"}
    assert scene.fleet.starts == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": "a/b"}, "SERIN_HOST"),
        ({"host": ".."}, "SERIN_HOST"),
        ({}, "--insecure-peers"),
        ({"peer_certificate": "c.pem"}, "name all three"),
        (
            {"peer_certificate": "c.pem", "peer_key": "k.pem", "peer_ca": "a.pem", "peer_port": None},
            "--peer-port",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], words: str) -> None:
    given = {name: getattr(SETTINGS, name) for name in AgentSettings.__slots__}
    with pytest.raises(StackUnusable, match=words):
        AgentSettings(**{**given, **change}).check(insecure_peers=False)
