"""Controllers and hosts that share a store, in one process and in simulated time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from serin.cluster.agents import AgentProcesses
from serin.cluster.combined_fleet import CombinedFleet
from serin.cluster.controller import ClusterVersions, LedController, LedProcesses, Loop
from serin.cluster.desired import ClusterRouter, DesiredStates
from serin.cluster.hosts import Hosts
from serin.cluster.judge import ClusterJudge
from serin.formats.schema import Schema
from serin.formats.serving.journal import DecisionCache
from serin.rollout.run.commands import Inbox
from serin.rollout.run.controller import Controller
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.leadership import Leadership
from serin.rollout.run.ports import Judge
from serin.rollout.run.verification import Beside
from serin.serving.external import External
from serin.store.objects import Objects
from serin.store.store import Store
from tests.fakes.rollout import FakeVersions

SCHEMA = Schema(task="binary", inputs=(), outputs=())


@dataclass
class SharedTime:
    """One time for everyone. A controller's clock reads it."""

    t: float = 1_000_000.0

    def now(self) -> float:
        return self.t

    def steady(self) -> float:
        return self.t

    def follow(self, *, not_before: float = 0.0) -> None:
        assert not_before <= self.t, "one clock never goes back"


@dataclass
class Settings:
    """What all controllers of a scene have in common. `judge` None: by the gateways' evidence."""

    time: SharedTime
    versions: FakeVersions
    judge: Judge | None = None
    replicas: int | None = None
    beside: Beside | None = None
    wait: Callable[[float], object] = field(default=lambda _: None)


class SimulatedLed(LedController):
    """With simulated time and without a store of bundles."""

    def __init__(
        self, objects: Objects, leadership: Leadership, term: int, cache: DecisionCache, has: Settings
    ) -> None:
        self._stopped, self._background = threading.Event(), None
        self._hosts = Hosts(objects, has.time.steady)
        self._desired = DesiredStates(objects, leadership, term, has.time.now)
        self._agents = AgentProcesses(
            self._desired, self._hosts, lambda _: has.replicas, has.time.steady, poll_s=0.001
        )
        external = External(Store("/nonexistent"))  # none is elsewhere
        self._controller = Controller(
            router=ClusterRouter(
                self._desired,
                self._hosts,
                rollouts=self._rollouts,
                timeouts_of=lambda _: {"request_s": 5.0},
                endpoint_of=lambda release: external.endpoint(release) if external.has(release) else None,
                wait=has.wait,
                steady=has.time.steady,
            ),
            fleet=CombinedFleet(LedProcesses(self._agents, leadership, term), external, lambda _: SCHEMA),
            judge=has.judge or ClusterJudge(objects, self._hosts, has.time.now),
            journals=StoreJournals(objects, leadership, term, cache=cache),
            versions=ClusterVersions(has.versions, leadership, term),
            commands=Inbox(objects, partial(leadership.check, term)),
            clock=has.time,
            beside=has.beside,
        )


class Member:
    """A controller's process: its part in the election, and its loop."""

    def __init__(self, name: str, objects: Objects, has: Settings) -> None:
        self.name = name
        self.leadership = Leadership(objects, name, has.time.steady)
        self.led: SimulatedLed | None = None

        def build(term: int, cache: DecisionCache) -> SimulatedLed:
            self.led = SimulatedLed(objects, self.leadership, term, cache, has)
            return self.led

        self.loop = Loop(objects, self.leadership, build)

    def step(self) -> None:
        self.leadership.step()
        self.loop.round()
