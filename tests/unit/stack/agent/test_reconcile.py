from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import ReleaseReport
from serin.stack.agent.reconcile import Action, Memory, Seen, gateway_table, next_action, wanted_here
from serin.store.artifacts import Endpoint, ModelRoute, Release

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
HERE = Endpoint(http="127.0.0.1:8000", grpc="127.0.0.1:8001")
READY = ReleaseReport(state="ready", instance=7, verified="")
STABLE_ONLY = ModelRoute(model="m", epoch=1, stable=V1)
SPLIT = ModelRoute(model="m", epoch=2, stable=V1, candidate=V2, candidate_percent=5.0)


def act(
    memory: Memory, state: str, t: float, *, wanted: bool = True, unrouted: bool = False, active: int = 0
) -> Action:
    seen = Seen(state=state, instance=7 if state == "ready" else None, active_requests=active)  # type: ignore[arg-type]
    return next_action(memory, seen, wanted=wanted, unrouted=unrouted, longest_request_s=5.0, t=t)


def state(*routes: ModelRoute, **hosts: tuple[str, ...]) -> DesiredState:
    return DesiredState(seq=1, term=1, by="c", t=0.0, routes=routes, hosts=hosts)


def test_a_release_is_started_verified_once_and_left_alone() -> None:
    memory = Memory()
    assert act(memory, "absent", 100.0) == "start"
    assert act(memory, "starting", 101.0) == "nothing"
    assert act(memory, "ready", 103.0) == "verify"
    memory.verifying = 7
    assert act(memory, "ready", 104.0) == "nothing"
    memory.verified, memory.verifying = {7: ""}, None
    assert act(memory, "ready", 105.0) == "nothing"
    memory.verified = {6: ""}
    assert act(memory, "ready", 106.0) == "verify", "another process"


def test_a_release_that_cannot_be_started_is_tried_again_with_growing_delays() -> None:
    memory = Memory()
    starts = [t for t in range(70) if act(memory, "absent", float(t)) == "start"]
    assert starts == [0, 1, 3, 7, 15, 31, 61]


def test_a_dead_release_is_restarted_after_some_seconds_and_its_delays_grow_until_it_is_ready() -> None:
    memory = Memory(verified={7: ""})
    assert act(memory, "ready", 100.0) == "nothing"
    died = [t for t in range(101, 116) if act(memory, "dead", float(t)) == "start"]
    assert died == [110, 111, 113]
    assert act(memory, "ready", 116.0) == "nothing"
    assert act(memory, "dead", 125.0) == "nothing", "it was ready in between"


@pytest.mark.parametrize(
    ("active", "until", "action"), [(0, 101.0, "stop"), (1, 101.0, "nothing"), (1, 161.0, "stop")]
)
def test_a_release_that_is_not_wanted_ends_when_its_requests_are_answered(
    active: int, until: float, action: Action
) -> None:
    memory = Memory(verified={7: ""})
    assert act(memory, "ready", 99.0, wanted=False) == "nothing", "its routes are still in force"
    assert act(memory, "ready", 100.0, wanted=False, unrouted=True) == "nothing", "routes changed just now"
    assert act(memory, "ready", until, wanted=False, unrouted=True, active=active) == action


def test_a_host_runs_what_names_it() -> None:
    desired = state(**{"m-v1": ("a", "b"), "m-v2": ("b",)})
    assert (wanted_here(desired, "a"), wanted_here(desired, "c")) == ({V1}, set())


def test_the_gateway_prefers_its_own_release_and_knows_its_peers() -> None:
    table = gateway_table(
        state(STABLE_ONLY), here={"m-v1": (HERE, READY)}, peers={"m-v1": ("b:1",)}, others={}, leaving=[]
    )
    assert (table.routes, table.endpoints, table.peers) == (
        (STABLE_ONLY,),
        {"m-v1": HERE},
        {"m-v1": ("b:1",)},
    )


@pytest.mark.parametrize(
    "broken",
    [
        replace(READY, state="dead"),
        replace(READY, state="starting", verified=None),
        replace(READY, verified="score 0.1"),
    ],
)
def test_a_release_that_does_not_answer_rightly_is_used_only_where_no_peer_has_it(
    broken: ReleaseReport,
) -> None:
    here = {"m-v1": (HERE, broken)}
    assert not gateway_table(
        state(STABLE_ONLY), here=here, peers={"m-v1": ("b:1",)}, others={}, leaving=[]
    ).endpoints
    assert gateway_table(state(STABLE_ONLY), here=here, peers={"m-v1": ()}, others={}, leaving=[]).endpoints


def test_nothing_is_applied_while_a_release_with_traffic_cannot_be_reached() -> None:
    table = gateway_table(state(SPLIT), here={"m-v1": (HERE, READY)}, peers={}, others={}, leaving=[])
    assert table.blocked
    assert table.problem == "not reachable from this host: m-v2"
    idle = replace(SPLIT, candidate_percent=0.0)
    table = gateway_table(state(idle), here={"m-v1": (HERE, READY)}, peers={}, others={}, leaving=[])
    assert not table.blocked
    assert table.routes == (replace(idle, candidate=None),)


def test_a_model_whose_release_is_nowhere_does_not_keep_the_others_from_being_routed() -> None:
    other = ModelRoute(model="n", epoch=1, stable=Release(model="n", version=1))
    table = gateway_table(
        state(STABLE_ONLY, other), here={"m-v1": (HERE, READY)}, peers={}, others={}, leaving=[]
    )
    assert table.routes == (STABLE_ONLY,)
    assert not table.blocked
    assert (table.waiting, table.missing) == ((), ("n",))


@pytest.mark.parametrize(
    ("here", "peers", "others", "waiting"),
    [
        ({"m-v1": (HERE, READY)}, {}, {}, ()),
        ({"m-v1": (HERE, replace(READY, state="starting"))}, {}, {}, ("m",)),
        ({}, {"m-v1": ("b:1",)}, {}, ()),
        ({}, {"m-v1": ()}, {"m-v1": ("b:1",)}, ("m",)),  # on a host that should have it, and has not
    ],
)
def test_a_model_waits_until_its_live_release_answers_somewhere(
    here: Any, peers: Any, others: Any, waiting: tuple[str, ...]
) -> None:
    table = gateway_table(state(STABLE_ONLY), here=here, peers=peers, others=others, leaving=[])
    assert (table.waiting, table.missing) == (waiting, ())


def test_a_release_that_leaves_gets_no_requests_but_keeps_its_cluster() -> None:
    here = {"m-v1": (HERE, READY), "m-v2": (HERE, READY)}
    table = gateway_table(
        state(STABLE_ONLY), here=here, peers={"m-v2": ("b:1",)}, others={}, leaving=["m-v2"]
    )
    assert table.leaving == {"m-v2"}
    assert "m-v2" in table.endpoints
    assert "m-v2" not in table.peers


def test_a_release_that_is_ready_nowhere_stays_routed_to_the_hosts_that_should_have_it() -> None:
    table = gateway_table(
        state(STABLE_ONLY), here={}, peers={"m-v1": ()}, others={"m-v1": ("b:1",)}, leaving=[]
    )
    assert (table.routes, table.peers, table.problem) == ((STABLE_ONLY,), {"m-v1": ("b:1",)}, "")
