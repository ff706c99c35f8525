"""What a controller and its callers may rely on, in a folder as in a shared store; and which controller leads."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serin.errors import ControllerSilent, LeadershipLost, StoreUnreachable
from serin.formats.cluster.leader import KEY, Leader
from serin.formats.serving.journal import Decision, DecisionCache
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import Rollouts
from serin.rollout.run.commands import INBOX, Answer, Command, Inbox
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.leadership import Leadership
from serin.rollout.run.ports import Journal, Journals
from serin.store.home_objects import HomeObjects
from serin.store.objects import FolderObjects
from tests.fakes.objects import MemoryClient, MemoryObjects, unreachable
from tests.fakes.rollout import home_journals


@dataclass
class Place:
    """One controller's ports and its callers' way to it."""

    journals: Callable[[], Journals]
    inbox: Callable[[], Inbox]
    rollouts: Rollouts
    inbox_folder: Path

    def put_command(self, name: str, content: str) -> None:
        self.inbox_folder.mkdir(parents=True, exist_ok=True)
        (self.inbox_folder / f"{name}.json").write_text(content)


def in_home(folder: Path) -> Place:
    objects = HomeObjects(folder)
    return Place(
        lambda: home_journals(folder, compact_at=1, young_s=0.0),
        lambda: Inbox(objects),
        Rollouts(objects),
        folder / "rollouts" / INBOX,
    )


def in_store(folder: Path) -> Place:
    objects = FolderObjects(folder)
    leadership = Leadership(objects, "one")
    leadership.step()
    term = leadership.term
    assert term == 1
    return Place(
        lambda: StoreJournals(
            objects, leadership, 1, cache=DecisionCache(objects), compact_at=1, young_s=0.0
        ),
        lambda: Inbox(objects, lambda: leadership.check(1)),
        Rollouts(objects),
        folder / "rollouts" / INBOX,
    )


@pytest.fixture(params=[in_home, in_store])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    made: Place = request.param(tmp_path)
    return made


STATE: dict[str, Any] = {
    "candidate": "flights-v2", "stable": None, "previous": None, "plan": Plan().to_json(), "hold": None,
    "epoch": 1, "began": 0.0, "since": 0.0, "evidence_from": 0.0,
}  # fmt: skip


def decision(**changes: Any) -> Decision:
    fields: dict[str, Any] = {
        "t": 10.0, "rollout": "r1", "phase": "shifting", "step": 0, "weight": 5.0, "verdict": "wait",
        "reason": "0 of 30 s", "by": "controller", "evidence": {"guards": {"closed": 7}}, "state": STATE,
    }  # fmt: skip
    return Decision(**(fields | changes))


def command(**changes: Any) -> Command:
    return Command(**({"kind": "start", "model": "flights", "version": 2, "by": "ann"} | changes))


def every(known: Sequence[Decision]) -> set[int]:
    return {each.seq for each in known}


def opened(place: Place) -> Journal:
    return place.journals().open("flights")


def test_decisions_are_numbered_from_1_and_come_back_as_they_were(place: Place) -> None:
    journal = opened(place)
    written = [journal.append(decision(t=float(t))) for t in range(5)]
    assert [each.seq for each in written] == [1, 2, 3, 4, 5]
    again = opened(place)
    assert again.all() == written
    assert again.append(decision()).seq == 6
    assert place.journals().models() == place.rollouts.models() == ["flights"]


def test_a_reader_sees_the_newest_and_one_rollout_s_decisions(place: Place) -> None:
    assert place.rollouts.last("flights") is None
    journal = opened(place)
    for number in range(40):
        journal.append(decision(t=float(number), rollout=f"r{number // 15}"))
    last = place.rollouts.last("flights")
    assert (last.seq, last.rollout) == (40, "r2")
    assert [each.seq for each in place.rollouts.decisions("flights", "r1")] == list(range(16, 31))
    assert [each.seq for each in place.rollouts.decisions("flights")] == list(range(1, 41))
    assert place.rollouts.decisions("flights", "unknown") == []


def test_a_reader_that_follows_sees_every_new_decision_and_no_removed_one(place: Place) -> None:
    journal = opened(place)
    read = place.rollouts.reader("flights", "r1")
    assert read() == []
    for t in range(6):
        journal.append(decision(t=float(t)))
        assert read()[-1].t == t
    assert journal.compact(lambda known: {known[0].seq, known[3].seq})
    journal.append(decision(t=9.0))
    assert [each.seq for each in read()] == [1, 4, 6, 7]
    assert [each.seq for each in journal.all()] == [1, 4, 6, 7]
    assert opened(place).append(decision()).seq == 8


def test_compaction_keeps_the_newest_whatever_is_asked(place: Place) -> None:
    journal = opened(place)
    for _ in range(3):
        journal.append(decision())
    assert journal.compact(lambda _: set())
    assert [each.seq for each in journal.all()] == [3]


def test_a_command_arrives_as_it_was_sent_and_in_order(place: Place) -> None:
    inbox = place.inbox()
    sent = [command(plan=Plan(steps=(10.0, 100.0)), why="newer data"), command(kind="pause", version=None)]
    for each in sent:
        place.rollouts.mailbox.submit(each)
        place.rollouts.mailbox.submit(each)  # a repeated submission is the same command
    assert inbox.pending() == sent


def test_an_answer_takes_the_command_away(place: Place) -> None:
    inbox, mailbox = place.inbox(), place.rollouts.mailbox
    given = command()
    mailbox.submit(given)
    assert mailbox.read_answer(given.name) is None
    answer = Answer(id=given.name, accepted=True, reason="", rollout="r1")
    inbox.answer(answer)
    assert (inbox.pending(), mailbox.read_answer(given.name)) == ([], answer)


def test_what_was_answered_is_not_answered_again(place: Place) -> None:
    inbox, given = place.inbox(), command()
    place.rollouts.mailbox.submit(given)
    inbox.answer(Answer(id=given.name, accepted=False, reason="busy"))
    place.put_command(given.name, json.dumps(given.to_json()))  # as after a crash before its removal
    assert inbox.pending() == []
    assert not list(place.inbox_folder.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "serin.command", "version": 2}',
        json.dumps(command().to_json() | {"kind": "explode"}),
        json.dumps(command().to_json() | {"model": "../etc"}),
        json.dumps(command().to_json() | {"release": "two"}),
        json.dumps(command().to_json() | {"release": True}),
        json.dumps(command().to_json() | {"plan": {"steps": [1]}}),
        json.dumps(command().to_json() | {"plan": {"step_s": "soon"}}),
        json.dumps(command().to_json() | {"id": "another"}),
    ],
)
def test_what_is_not_a_command_is_answered_and_removed(place: Place, content: str) -> None:
    inbox = place.inbox()
    place.put_command("flights.c1", content)
    good = place.rollouts.mailbox.submit(command())
    assert [each.id for each in inbox.pending()] == [good]
    answer = place.rollouts.mailbox.read_answer("flights.c1")
    assert not answer.accepted
    assert answer.reason.startswith("not a command: ")


@pytest.mark.parametrize("name", ["flights.c1", "flight.c1", "payments.c2"])
def test_a_command_is_taken_from_the_object_of_its_model_and_id_alone(place: Place, name: str) -> None:
    """A store's rules say who may write which of them."""
    inbox = place.inbox()
    place.put_command(name, json.dumps(command(model="payments", id="c1").to_json()))
    assert inbox.pending() == []
    answer = place.rollouts.mailbox.read_answer(name)
    assert answer is not None
    assert "differs from its object's name" in answer.reason
    assert place.rollouts.mailbox.read_answer("payments.c1") is None
    assert not list(place.inbox_folder.iterdir())


def test_commands_of_both_boxes_come_in_their_order_and_are_withdrawn(place: Place) -> None:
    box, given = (
        place.rollouts.mailbox,
        [command(kind=kind) for kind in ("approve", "pause", "promote", "abort")],
    )
    for each in reversed(given):
        box.submit(each)
    assert [each.kind for each in place.inbox().pending()] == ["approve", "pause", "promote", "abort"]
    box.withdraw(given[0])
    place.inbox().answer(Answer(id=given[2].name, accepted=True, reason=""))
    assert [each.kind for each in place.inbox().pending()] == ["pause", "abort"]


def test_ask_waits_for_the_answer(place: Place) -> None:
    inbox, done = place.inbox(), threading.Event()

    def controller() -> None:
        while not done.wait(0.01):
            for each in inbox.pending():
                inbox.answer(Answer(id=each.name, accepted=True, reason="", rollout="r1"))

    thread = threading.Thread(target=controller)
    thread.start()
    try:
        assert place.rollouts.mailbox.ask(command(), timeout_s=3.0).rollout == "r1"
    finally:
        done.set()
        thread.join()


def test_a_command_nobody_answers_is_taken_back(place: Place) -> None:
    with pytest.raises(ControllerSilent, match="taken back"):
        place.rollouts.mailbox.ask(command(), timeout_s=0.1)
    assert place.inbox().pending() == []


@pytest.mark.parametrize("name", ["../../secret", "", "a/b", "x" * 65])
def test_an_id_never_leads_out_of_its_folder(place: Place, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a command"):
        place.rollouts.mailbox.read_answer(name)


def test_of_two_writers_of_a_store_s_journal_one_loses_and_steps_down(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    clock = [0.0]
    first, second = (Leadership(objects, name, lambda: clock[0]) for name in ("one", "two"))
    first.step()
    journal = StoreJournals(objects, first, 1).open("flights")
    journal.append(decision())
    second.step()
    clock[0] = 6.0
    second.step()
    assert second.term == 2
    other = StoreJournals(objects, second, 2).open("flights")
    other.append(decision(reason="another leads"))
    first._renewed_at = clock[0]  # frozen between its check and its write
    with pytest.raises(LeadershipLost):
        journal.append(decision(reason="stale"))
    assert first.term is None
    assert [each.reason for each in other.all()] == ["0 of 30 s", "another leads"]


THEIRS = Leader(holder="one", term=3, beat=7)


class Clock:
    t = 100.0

    def __call__(self) -> float:
        return self.t


def pair() -> tuple[MemoryObjects, Clock, Leadership, Leadership]:
    store, clock = MemoryObjects(), Clock()
    return store, clock, Leadership(store, "one", clock), Leadership(store, "two", clock)


@pytest.mark.parametrize(
    ("leader", "waited", "term"),
    [
        (None, 0.0, 1),
        (THEIRS, 4.9, None),
        (THEIRS, 5.0, 4),
        (Leader(holder="", term=3), 0.0, 4),
        (Leader(holder="two", term=3), 0.0, 4),
    ],
)
def test_a_record_may_be_taken_over(leader: Leader | None, waited: float, term: int | None) -> None:
    store, clock, _, two = pair()
    if leader:
        store.put(KEY, leader.dump())
    two.step()
    clock.t += waited
    if two.term is None:
        two.step()
    assert two.term == term


def test_a_beat_begins_the_wait_again() -> None:
    store, clock, _, two = pair()
    for beat, term in ((7, None), (8, None), (8, 4)):
        store.put(KEY, Leader(holder="one", term=3, beat=beat).dump())
        two.step()
        clock.t += 2.6
        two.step()
        assert two.term == term


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
    clock.t += 4.0
    one.check(1)
    clock.t += 0.1
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
    assert found.content == b"hello"
