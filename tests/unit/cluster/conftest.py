import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from serin.formats.serving.journal import Decision
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import Rollouts
from serin.rollout.run.commands import Command, Kind
from serin.rollout.run.record import decision2rollout
from tests.fakes.agents import FakeAgent
from tests.fakes.cluster import Member, Settings, SharedTime
from tests.fakes.objects import MemoryObjects
from tests.fakes.rollout import FakeJudge, FakeVersions

PLAN = Plan(steps=(5.0, 50.0, 100.0), drain_s=10.0)


@dataclass
class Cluster:
    """Hosts and controllers around a store in memory. Each step is a second."""

    store: MemoryObjects = field(default_factory=MemoryObjects)
    time: SharedTime = field(default_factory=SharedTime)
    judge: Any = field(default_factory=FakeJudge)
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)  # names of hosts and controllers that do nothing

    def __post_init__(self) -> None:
        versions = FakeVersions(published={"flights": [1, 2, 3], "taxis": [1, 2]})
        self.settings = Settings(time=self.time, versions=versions, judge=self.judge, wait=self._wait)
        self.rollouts = Rollouts(self.store)

    def host(self, *names: str) -> None:
        for name in names:
            self.agents[name] = FakeAgent(self.store, name)

    def controller(self, *names: str) -> None:
        for name in names:
            self.members[name] = Member(name, self.store, self.settings)

    @property
    def leader(self) -> Member:
        (found,) = [member for member in self.members.values() if member.leadership.term is not None]
        return found

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._step_hosts()
            for name, member in self.members.items():
                if name not in self.frozen:
                    member.step()
            self.time.t += 1.0
            time.sleep(0.001)  # verifications run in threads

    def _step_hosts(self) -> None:
        for name, agent in self.agents.items():
            if name not in self.frozen:
                agent.step(self.time.t)

    def _wait(self, seconds: float) -> None:
        self.time.t += seconds
        self._step_hosts()

    def command(self, kind: Kind, version: int | None = None, **changes: Any) -> str:
        fields: dict[str, Any] = {"model": "flights", "by": "ann", "plan": PLAN if kind == "start" else None}
        return self.rollouts.mailbox.submit(Command(kind=kind, version=version, **(fields | changes)))

    def now(self, model: str = "flights") -> Rollout:
        last = self.rollouts.last(model)
        assert last is not None
        return decision2rollout(last)

    def decisions(self, model: str = "flights") -> list[Decision]:
        return self.rollouts.decisions(model)

    def until(self, wanted: Phase | Callable[[Rollout], bool], steps: int = 200) -> Rollout:
        for _ in range(steps):
            self.step()
            last = self.rollouts.last("flights")
            if last is None:
                continue
            now = decision2rollout(last)
            if wanted(now) if not isinstance(wanted, Phase) else now.phase is wanted:
                return now
        raise AssertionError(f"not reached: {[(d.phase, d.reason) for d in self.decisions()][-4:]}")

    def promote_first(self) -> None:
        self.command("start", 1)
        self.until(Phase.PROMOTED)
        self.step(2)

    def serve_first(
        self, *hosts: str, controllers: tuple[str, ...] = ("one",), replicas: int | None = None
    ) -> None:
        """Version 1 is live on these hosts."""
        self.settings.replicas = replicas
        self.host(*hosts)
        self.controller(*controllers)
        self.promote_first()

    def start_second(self, phase: Phase = Phase.SHIFTING) -> Rollout:
        self.command("start", 2)
        return self.until(phase)

    def close(self) -> None:
        for member in self.members.values():
            member.loop.step_down()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()
