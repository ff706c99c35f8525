from __future__ import annotations

import pytest

from serin.errors import LeadershipLost, StoreUnreachable
from serin.formats.cluster.leader import KEY, Leader
from serin.rollout.cluster.leadership import Leadership
from serin.rollout.decide.election import Watch, claim, look, may_act
from tests.fakes.objects import MemoryClient, MemoryObjects, unreachable

THEIRS = Leader(holder="one", term=3, beat=7)


class Clock:
    t = 100.0

    def __call__(self) -> float:
        return self.t


def pair() -> tuple[MemoryObjects, Clock, Leadership, Leadership]:
    store, clock = MemoryObjects(), Clock()
    return store, clock, Leadership(store, "one", clock), Leadership(store, "two", clock)


@pytest.mark.parametrize(
    ("leader", "waited", "wanted"),
    [
        (None, 0.0, Leader(holder="two", term=1)),
        (THEIRS, 4.9, None),
        (THEIRS, 5.0, Leader(holder="two", term=4)),
        (Leader(holder="", term=3), 0.0, Leader(holder="two", term=4)),
        (Leader(holder="two", term=3), 0.0, Leader(holder="two", term=4)),
    ],
)
def test_a_record_may_be_taken_over(leader: Leader | None, waited: float, wanted: Leader | None) -> None:
    assert claim(Watch(leader=leader, since=10.0), 10.0 + waited, "two") == wanted


def test_a_beat_begins_the_wait_again() -> None:
    watch = look(None, THEIRS, 1.0)
    assert look(watch, THEIRS, 3.0).since == 1.0
    assert look(watch, Leader(holder="one", term=3, beat=8), 3.0).since == 3.0


def test_a_leader_stops_acting_before_anyone_may_take_over() -> None:
    renewed = 10.0
    assert may_act(renewed, 14.0)
    assert not may_act(renewed, 14.1)
    assert claim(Watch(leader=THEIRS, since=renewed), 14.1, "two") is None


def test_one_leads_and_renews_and_the_other_waits() -> None:
    _, clock, one, two = pair()
    for _ in range(20):
        one.step()
        two.step()
        clock.t += 1.0
    assert (one.term, two.term) == (1, None)
    assert one.leader == Leader(holder="one", term=1, beat=19)


def test_a_leader_that_ends_is_replaced_and_does_not_act_again() -> None:
    _, clock, one, two = pair()
    one.step()
    two.step()
    for _ in range(6):
        clock.t += 1.0
        two.step()
    assert two.term == 2
    with pytest.raises(LeadershipLost):
        one.check(1)
    one.step()
    one.step()
    assert (one.term, two.term) == (None, 2)


def test_a_leader_that_was_frozen_is_stopped_by_its_own_clock() -> None:
    _, clock, one, _ = pair()
    one.step()
    one.check(1)
    clock.t += 4.5
    with pytest.raises(LeadershipLost):
        one.check(1)


def test_a_leader_that_resigns_is_replaced_at_once() -> None:
    _, _, one, two = pair()
    one.step()
    two.step()
    one.resign()
    two.step()
    assert (one.term, two.term) == (None, 2)


def test_a_leader_cut_off_from_the_store_steps_down_and_leads_again_in_a_new_term() -> None:
    store, clock = MemoryObjects(), Clock()
    away = False

    def before(_operation: str, _key: str) -> None:
        if away:
            raise unreachable()

    one = Leadership(MemoryClient(store, before=before), "one", clock)
    one.step()
    away = True
    for _ in range(5):
        clock.t += 1.0
        if one.term is not None:
            with pytest.raises(StoreUnreachable):
                one.step()
    assert one.term is None
    away = False
    one.step()  # notices that its renewal is too old
    one.step()
    assert one.term == 2


def test_a_renewal_whose_answer_was_lost_is_not_another_s() -> None:
    store, clock = MemoryObjects(), Clock()
    lost = False

    def after(operation: str, _key: str) -> None:
        if lost and operation == "replace":
            raise unreachable()

    one = Leadership(MemoryClient(store, after=after), "one", clock)
    one.step()
    lost = True
    clock.t += 1.0
    with pytest.raises(StoreUnreachable):
        one.step()
    lost = False
    clock.t += 1.0
    one.step()
    assert one.term == 1
    clock.t += 3.0
    one.check(1)


def test_a_record_that_is_not_one_is_left_alone() -> None:
    store, _, one, _ = pair()
    store.put(KEY, b"hello")
    with pytest.raises(LeadershipLost, match="cannot be read"):
        one.step()
    found = store.read(KEY)
    assert found is not None
    assert found.content == b"hello"
