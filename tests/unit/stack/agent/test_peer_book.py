from __future__ import annotations

from typing import Any

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport, ReleaseReport
from serin.stack.agent.peer_book import PeerBook

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
