"""Two or three controllers under random schedules, with freezes and a store that fails before or after writing."""

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from serin.errors import SerinError
from serin.formats.cluster.desired_state import PREFIX, DesiredState
from serin.formats.serving.journal import Decision, load_decision, prefix_of
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import Rollouts
from serin.rollout.run.commands import Command, command_name
from serin.rollout.run.journal import StoreJournal
from serin.rollout.run.record import decision2rollout
from serin.store.artifacts import ModelRoute
from tests.fakes.agents import FakeAgent
from tests.fakes.cluster import Member, Settings, SharedTime
from tests.fakes.objects import MemoryClient, MemoryObjects, unreachable
from tests.fakes.rollout import FakeJudge, FakeVersions

_WRITES = ("create", "replace", "put")


class Ended(BaseException):
    """The schedule is over: the thread that sees this ends."""


@dataclass
class Actor:
    """A thread that waits for its turn before each operation on the store."""

    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thawed_at: float = 0.0
    ended: bool = False


class Schedule:
    """`failing`: share of operations that fail. `freezing`: share of operations at which a controller is frozen."""

    def __init__(self, seed: int, *, failing: float, freezing: float) -> None:
        self.random = random.Random(seed)
        self.time, self.store = SharedTime(), MemoryObjects()
        self.failing, self.freezing = failing, freezing
        self.actors: list[Actor] = []
        self.groups: dict[str, list[Actor]] = {}
        self._begun = self._over = False
        self._running: dict[int, Actor] = {}
        self._threads: list[threading.Thread] = []

    def client(self) -> MemoryClient:
        """Returns a way to the store for all threads of a process. Threads that are not actors are never paused."""

        def before(operation: str, _key: str) -> None:
            actor = self._running.get(threading.get_ident())
            if actor is None:
                return
            self.pause(actor)
            if self.random.random() < self.failing:
                raise unreachable()
            if operation in _WRITES and self.random.random() < self.freezing:
                self.freeze(actor.name)
                self.pause(actor)

        def after(operation: str, _key: str) -> None:
            known = threading.get_ident() in self._running
            if known and operation in _WRITES and self.random.random() < self.failing:
                raise unreachable()

        return MemoryClient(self.store, before=before, after=after)

    def add(self, name: str, body: Callable[[Actor], None]) -> Actor:
        """Adds a thread of the process `name`. Its body runs until the schedule is over."""
        actor = Actor(name)
        self.actors.append(actor)
        self.groups.setdefault(name, []).append(actor)

        def run() -> None:
            self._running[threading.get_ident()] = actor
            try:
                self.pause(actor)
                body(actor)
            except Ended:
                pass
            finally:
                actor.ended = True
                actor.done.release()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return actor

    def pause(self, actor: Actor) -> None:
        """Gives the turn back, and waits for the next one."""
        actor.done.release()
        actor.turn.acquire()
        if self._over:
            raise Ended

    def freeze(self, name: str) -> None:
        until = self.time.t + self.random.uniform(3.0, 25.0)
        for actor in self.groups[name]:
            actor.thawed_at = until

    def run(self, until: Callable[[], bool], *, turns: int, each_second: Callable[[], None]) -> bool:
        """Gives turns at random until `until` holds; returns whether it did."""
        if not self._begun:
            self._begun = True
            for actor in self.actors:
                actor.done.acquire()
        second = self.time.t
        for turn in range(turns):
            ready = [actor for actor in self.actors if not actor.ended and actor.thawed_at <= self.time.t]
            if ready:
                actor = self.random.choice(ready)
                actor.turn.release()
                actor.done.acquire()
            self.time.t += self.random.uniform(0.0, 0.05)
            if self.time.t - second >= 1.0:
                second = self.time.t
                each_second()
            if turn % 20 == 0 and until():
                return True
        return until()

    def end(self) -> None:
        self._over = True
        for actor in self.actors:
            actor.turn.release()
        for thread in self._threads:
            thread.join(timeout=10.0)
            assert not thread.is_alive(), "a thread of the schedule hangs"


PLAN = Plan(steps=(5.0, 50.0, 100.0), drain_s=5.0, load_s=1e6, unready_s=1e6)
DECISIONS = prefix_of("flights")


class Scene:
    def __init__(self, seed: int, controllers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedule = Schedule(seed, failing=0.02, freezing=0.06)
        store = self.schedule.store
        self.agents = [FakeAgent(store, host) for host in ("a", "b")]
        self.rollouts = Rollouts(store)
        self.believed: list[Decision] = []  # what controllers took for their decisions
        self.led: set[tuple[str, int]] = set()
        self.settings = Settings(
            time=self.schedule.time,
            versions=FakeVersions(published={"flights": [1, 2]}),
            judge=FakeJudge(step_s=3.0, bake_s=3.0),
        )
        append = StoreJournal.append

        def noted(journal: StoreJournal, decision: Decision, *, urgent: bool = False) -> Decision:
            written = append(journal, decision, urgent=urgent)
            self.believed.append(written)
            return written

        monkeypatch.setattr(StoreJournal, "append", noted)
        for number in range(controllers):
            self._add(f"controller-{number}")

    def _add(self, name: str) -> None:
        """Adds a process with two threads: one renews the leadership, one decides."""
        schedule, member = self.schedule, Member(name, self.schedule.client(), self.settings)

        def renew(actor: Actor) -> None:
            due = 0.0
            while True:
                if schedule.time.t >= due:
                    due = schedule.time.t + 1.0
                    with contextlib.suppress(SerinError):
                        member.leadership.step()
                    if member.leadership.term is not None:
                        self.led.add((name, member.leadership.term))
                schedule.pause(actor)

        def decide(actor: Actor) -> None:
            while True:
                member.loop.round()
                schedule.pause(actor)

        schedule.add(name, renew)
        schedule.add(name, decide)

    def step_hosts(self) -> None:
        for agent in self.agents:
            agent.step(self.schedule.time.t)

    def submit(self, version: int) -> str:
        command = Command(kind="start", model="flights", version=version, by="ann", plan=PLAN)
        return self.rollouts.mailbox.submit(command)

    def start(self, version: int, turns: int) -> str:
        """Submits until a start is accepted. A leader whose last write was not acknowledged does not know yet that the
        rollout before has ended."""
        while True:
            command = self.submit(version)
            read = partial(self.rollouts.mailbox.read_answer, command_name("flights", command))
            assert self.schedule.run(partial(self._is_there, read), turns=turns, each_second=self.step_hosts)
            answer = read()
            assert answer is not None
            if answer.accepted:
                return command
            assert "is draining" in answer.reason

    @staticmethod
    def _is_there(read: Callable[[], object]) -> bool:
        return read() is not None

    def until_promoted(self, command: str, turns: int) -> None:
        def promoted() -> bool:
            last = self.rollouts.last("flights")
            return last is not None and last.rollout == command and last.phase == Phase.PROMOTED

        assert self.schedule.run(promoted, turns=turns, each_second=self.step_hosts), [
            (each.seq, each.phase, each.reason) for each in self.rollouts.decisions("flights")[-4:]
        ]


def traffic(route: ModelRoute | None) -> tuple[object, ...] | None:
    """A candidate without traffic may be left out of a push."""
    if route is None:
        return None
    return (route.epoch, route.stable, route.candidate_percent, route.candidate_percent and route.candidate)


def check_actions(created: list[tuple[str, bytes]]) -> int:
    """Every desired state has the routes of the newest decision that existed when it was written."""
    newest: Decision | None = None
    actions = 0
    for key, content in created:
        if key.startswith(DECISIONS):
            newest = load_decision(key, content)
        elif key.startswith(PREFIX):
            state = DesiredState.load(content)
            actions += 1
            for route in state.routes:
                assert newest is not None, "an action without its decision"
                assert route.epoch <= decision2rollout(newest).epoch
                if route.epoch == decision2rollout(newest).epoch:
                    assert traffic(route) == traffic(decision2rollout(newest).route)
    return actions


@pytest.mark.parametrize("seed", range(16))
def test_no_schedule_doubles_a_decision_or_acts_without_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(seed, 2 + seed % 2, monkeypatch)
    try:
        commands = []
        for version in (1, 2):
            commands.append(scene.start(version, turns=30_000))
            scene.until_promoted(commands[-1], turns=30_000)
    finally:
        scene.schedule.end()
    decisions = scene.rollouts.decisions("flights")
    assert [each.seq for each in decisions] == list(range(1, len(decisions) + 1))
    stored = {each.seq: each for each in decisions}
    assert all(stored[each.seq] == each for each in scene.believed), "two decisions with one number"
    obeyed = [each.command for each in decisions if each.command]
    assert obeyed == commands, "each command is obeyed once"
    assert check_actions(scene.schedule.store.created) >= 6
    terms = [term for _, term in scene.led]
    print(
        f"seed {seed}: terms {sorted(terms)}, {len(decisions)} decisions, {scene.schedule.time.t - 1e6:.0f} s"
    )
    assert len(terms) == len(set(terms)), "two controllers led in one term"
