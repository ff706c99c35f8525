"""How hosts that train together agree: rounds, places of ranks, and what each does next."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import SpecError
from serin.store.objects import FolderObjects
from serin.training.launch.machines import Machines, machines_told
from serin.training.launch.status import Status
from serin.training.launch.together.agree import GATHER_S, Hosts, next_step
from serin.training.launch.together.meeting import Meeting, View
from serin.training.launch.together.round import Member, Place, Round, distribute

THREE = Hosts(least=1, begin=3, most=3)


def member(host: str, *, gpus: int | None = None, instance: str = "1") -> Member:
    return Member(host=host, instance=instance, address="192.0.2.1", port=1, processes=1, gpus=gpus)


def there(*hosts: str) -> dict[str, Member]:
    return {host: member(host) for host in hosts}


def round_of(*hosts: str, seq: int = 1) -> Round:
    places = tuple(Place(host=host, instance="1", ranks=1) for host in hosts)
    return Round(seq=seq, by="a", places=places, address="192.0.2.1", port=1)


@pytest.mark.parametrize(
    ("view", "me", "after", "waited_s", "expected"),
    [
        (View(there=there("a", "b")), "a", 0, 0.0, "wait"),
        (View(there=there("a", "b", "c")), "a", 0, 0.0, "propose"),
        (View(there=there("a", "b", "c")), "b", 0, 0.0, "wait"),
        (View(there=there("b"), newest=round_of("a", "b", "c")), "b", 1, 0.0, "propose"),
        (View(there=there("b", "c"), newest=round_of("a", "b", "c")), "c", 1, 0.0, "wait"),
        (View(there=there("a", "b", "c"), newest=round_of("a", "b", "c")), "b", 0, 0.0, "work"),
        (View(there=there("a", "b", "c"), newest=round_of("a", "b")), "c", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("b", "c")), "a", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="done")), "a", 0, 0.0, "ended"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="failed")), "a", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="again")), "a", 1, 0.0, "propose"),
    ],
    ids=[
        "too few to begin", "the first of all proposes", "another does not", "one that remains continues",
        "the second that remains waits for the first", "a round with me", "a round without me is not disturbed",
        "a new session needs all hosts", "the end", "after a failure all must come again", "a repeated round",
    ],
)  # fmt: skip
def test_what_a_host_does_next(view: View, me: str, after: int, waited_s: float, expected: str) -> None:
    assert next_step(view, member(me), THREE, after=after, waited_s=waited_s).kind == expected


def test_enough_hosts_begin_without_the_others_after_a_while() -> None:
    view, hosts = View(there=there("a", "b")), Hosts(least=2, begin=2, most=3)
    assert next_step(view, member("a"), hosts, after=0, waited_s=GATHER_S - 1).kind == "wait"
    assert next_step(view, member("a"), hosts, after=0, waited_s=GATHER_S).kind == "propose"


def test_all_hosts_are_needed_to_begin_unless_fewer_were_allowed() -> None:
    view = View(there=there("a", "b"))
    assert next_step(view, member("a"), THREE, after=0, waited_s=10 * GATHER_S).kind == "wait"


def test_a_training_whose_result_was_removed_is_done_again() -> None:
    view = View(there=there("a", "b", "c"), newest=round_of("a", seq=4), end=Status(state="done"))
    assert next_step(view, member("a"), THREE, after=0, waited_s=0).kind == "ended"
    assert next_step(view, member("a"), THREE, after=4, waited_s=0, removed=4).kind == "propose"


def test_a_launcher_that_was_started_again_counts_as_lost() -> None:
    again = {**there("a", "b"), "c": member("c", instance="2")}
    view = View(there=again, newest=round_of("a", "b", "c"))
    assert view.lost(round_of("a", "b", "c")) == ["c"]
    assert next_step(view, member("a"), THREE, after=1, waited_s=0).kind == "propose"


@pytest.mark.parametrize(
    ("gpus", "ranks", "batch_rows", "expected"),
    [
        ([None, None, None], 3, None, [1, 1, 1]),
        ([None, None], 3, 120, [2, 1]),
        ([None], 3, 120, [3]),
        ([None, None, None], 2, None, [1, 1]),
        ([4, 4], 12, 96, [4, 4]),
        ([4, 3], 12, 96, [3, 3]),
        ([2, 8], 8, 96, [2, 6]),
    ],
)
def test_ranks_are_kept_where_hosts_allow_it(
    gpus: list[int | None], ranks: int, batch_rows: int | None, expected: list[int]
) -> None:
    members = [member(f"h{number}", gpus=count) for number, count in enumerate(gpus)]
    assert [place.ranks for place in distribute(members, ranks, batch_rows=batch_rows)] == expected


def test_members_see_each_other_and_the_first_proposal_wins(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    with Meeting(objects, "run", member("a")) as a, Meeting(objects, "run", member("b")) as b:
        until = time.monotonic() + 20
        while not (a.view().there.keys() == b.view().there.keys() == {"a", "b"}):
            assert time.monotonic() < until
            time.sleep(0.05)
        a.propose(round_of("a", "b"))
        b.propose(replace(round_of("b"), by="b"))
        while (seen := b.view().newest) is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert seen == round_of("a", "b")
        b.come_again()
        while a.view().lost(seen) != ["b"]:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert objects.keys("trainings/run/members/") == []


@pytest.mark.parametrize("words", ["two", "3:2", "0:2", "2:", ":2:3", ""])
def test_numbers_of_machines_that_mean_nothing_are_refused(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_MACHINES", words or "x")
    monkeypatch.setenv("SERIN_STORE", "s3://somewhere")
    with pytest.raises(SpecError):
        machines_told()


def test_machines_meet_in_the_store_unless_a_rendezvous_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_STORE", "s3://somewhere")
    assert machines_told(count="2:3") == Machines(count=3, least=2, store="s3://somewhere")
    assert machines_told(count="3").in_store
    assert not machines_told(count="3", rendezvous="10.0.0.1:29400").in_store
    assert not machines_told(count="1").in_store
