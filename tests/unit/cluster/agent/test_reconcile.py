"""How an agent follows a desired state, and what it knows of its peers."""

from dataclasses import replace
from typing import Any

import pytest

from serin.cluster.agent.link import PeerBook
from serin.cluster.agent.reconcile import Action, Memory, Seen, gateway_table, next_action, wanted_here
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport, ReleaseReport
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


DESIRED = DesiredState(seq=1, term=1, by="c", t=0.0, hosts={"m-v1": ("a", "b", "c")})


def said(host: str, beat: int, **release: Any) -> AgentReport:
    found = ReleaseReport(**{"state": "ready", "verified": "", **release})
    return AgentReport(
        host=host, beat=beat, t=0.0, address="-", peer=f"{host}:9", desired_seq=1, evidence_seq=0,
        releases={"m-v1": found},
    )  # fmt: skip


def test_peers_are_those_that_report_the_release_as_ready_and_right() -> None:
    book = PeerBook("a")
    book.note("b", said("b", 1), 0.0)
    book.note("c", said("c", 1, verified="score 0.1"), 0.0)
    assert book.ready(["m-v1", "m-v2"]) == {"m-v1": ("b:9",), "m-v2": ()}
    book.note("c", said("c", 2, verified=None), 1.0)
    assert book.ready(["m-v1"]) == {"m-v1": ("b:9", "c:9")}
    book.note("b", said("b", 2, state="dead"), 1.0)
    assert book.ready(["m-v1"]) == {"m-v1": ("c:9",)}
    book.note("c", None, 2.0)
    assert book.ready(["m-v1"]) == {"m-v1": ()}, "forgotten"


def test_a_silent_peer_is_left_out_where_another_one_has_the_release() -> None:
    book = PeerBook("a")
    for t in range(8):
        book.note("b", said("b", 1), float(t))
        book.note("c", said("c", t), float(t))
    assert book.ready(["m-v1"]) == {"m-v1": ("c:9",)}
    for t in range(8, 16):
        book.note("c", said("c", 7), float(t))
    assert book.ready(["m-v1"]) == {"m-v1": ("b:9", "c:9")}, "perhaps only their reports are late"


def test_a_store_that_does_not_answer_makes_no_peer_silent() -> None:
    book = PeerBook("a")
    book.note("b", said("b", 1), 0.0)
    book.note("c", said("c", 1), 0.0)  # and nothing can be read for an hour
    book.note("b", said("b", 2), 3600.0)
    assert book.ready(["m-v1"]) == {"m-v1": ("b:9", "c:9")}


def test_hosts_are_read_in_turn_and_forgotten_when_they_run_nothing() -> None:
    book = PeerBook("a")
    assert book.hosts(DESIRED) == ["b", "c"]
    book.note("b", said("b", 1), 1.0)
    assert book.hosts(DESIRED) == ["c", "b"]
    assert book.hosts(DesiredState(seq=2, term=1, by="c", t=0.0, hosts={"m-v1": ("a",)})) == []
    assert book.ready(["m-v1"]) == {"m-v1": ()}
