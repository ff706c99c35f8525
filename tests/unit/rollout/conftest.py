from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Answer, Command, Kind, command_name
from serin.rollout.run.controller import Controller
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.verification import Beside, run
from serin.store.artifacts import ModelRoute, Release
from tests.fakes.rollout import (
    Bomb,
    FakeClock,
    FakeFleet,
    FakeJudge,
    FakeReplayer,
    FakeRouter,
    FakeVersions,
    Mined,
    home_inbox,
    home_journals,
)
from tests.logs import heard

PLAN = Plan(steps=(5.0, 50.0, 100.0), drain_s=10.0)


def at_once(work: Callable[[], None]) -> Future[None]:
    """Verifies within the tick, for tests that count actions per tick."""
    future: Future[None] = Future()
    run(work, future)
    return future


def release(version: int, model: str = "flights") -> Release:
    return Release(model=model, version=version)


@dataclass
class Scene:
    """Everything a controller meets, and the controller. What is here stays when the controller dies."""

    home: Path
    clock: FakeClock = field(default_factory=FakeClock)
    fleet: FakeFleet = field(default_factory=FakeFleet)
    judge: FakeJudge = field(default_factory=FakeJudge)
    router: FakeRouter = field(default_factory=FakeRouter)
    versions: FakeVersions = field(
        default_factory=lambda: FakeVersions(published={"flights": [1, 2, 3], "taxis": [1, 2]})
    )
    bomb: Bomb = field(default_factory=Bomb)
    replayer: FakeReplayer = field(default_factory=FakeReplayer)
    beside: Beside | None = at_once  # None: as in a real controller, in threads
    compact_at: int = 1  # so that journals are compacted again and again
    said: list[str] = field(default_factory=list)
    check: Callable[[Release], None] | None = None
    approval: Callable[[], bool] | None = None
    lacks: str = ""  # what every candidate lacks
    _controller: Controller | None = None

    def __post_init__(self) -> None:
        self.router.watch = self._must_be_journaled

    @property
    def controller(self) -> Controller:
        if self._controller is None:
            self._controller = Controller(
                router=Mined(self.router, self.bomb, "apply"),
                fleet=Mined(self.fleet, self.bomb, "start", "stop", "verify"),
                judge=self.judge,
                journals=Mined(
                    home_journals(self.home, compact_at=self.compact_at, young_s=0.0),
                    self.bomb,
                    "append",
                    "compact",
                    wrap="open",
                ),
                versions=Mined(self.versions, self.bomb, "set_alias"),
                commands=Mined(home_inbox(self.home), self.bomb, "answer"),
                clock=self.clock,
                beside=self.beside,
                replayer=self.replayer,
                check=self.check,
                approval=self.approval,
                lacks=lambda _: self.lacks,
            )
        return self._controller

    def kill(self) -> None:
        """What a killed process leaves: its locks free, nothing else done."""
        if self._controller:
            self._controller.close()
        self._controller = None

    def command(self, kind: Kind, version: int | None = None, **changes: Any) -> str:
        fields: dict[str, Any] = {"model": "flights", "by": "ann", "plan": PLAN if kind == "start" else None}
        return home_rollouts(self.home).mailbox.submit(
            Command(kind=kind, version=version, **(fields | changes))
        )

    def answer(self, command_id: str, model: str = "flights") -> Answer:
        answer = home_rollouts(self.home).mailbox.read_answer(command_name(model, command_id))
        assert answer is not None
        return answer

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            with heard(self.said.append):
                self.controller.tick()
            self.clock.t += 0.5

    def until(self, *phases: Phase, model: str = "flights", ticks: int = 200) -> Rollout:
        return self.until_true(lambda now: now.phase in phases, model=model, ticks=ticks)

    def until_true(
        self, wanted: Callable[[Rollout], bool], *, model: str = "flights", ticks: int = 200
    ) -> Rollout:
        for _ in range(ticks):
            self.tick()
            for now in self.controller.rollouts():
                if now.model == model and wanted(now):
                    return now
        raise AssertionError(f"not reached in {ticks} ticks: {self.said[-3:]}")

    def promote_first(self, version: int = 1, model: str = "flights") -> None:
        self.command("start", version, model=model)
        self.until(Phase.PROMOTED, model=model)
        self.tick()

    def roll_out(self, wanted: Phase | Callable[[Rollout], bool], **changes: Any) -> Rollout:
        """Promotes version 1, starts version 2, and returns its rollout once it is in that phase, or is as wanted."""
        self.promote_first()
        self.command("start", 2, **changes)
        return self.until(wanted) if isinstance(wanted, Phase) else self.until_true(wanted)

    def _must_be_journaled(self, routes: Sequence[ModelRoute]) -> None:
        """No traffic moves that no journal says."""
        for route in routes:
            decision = home_rollouts(self.home).last(route.model)
            assert decision is not None
            assert _traffic(decision2rollout(decision).route) == _traffic(route)


def _traffic(route: ModelRoute | None) -> tuple[object, ...]:
    """A candidate without traffic may be left out of a push."""
    assert route is not None
    return (route.epoch, route.stable, route.candidate_percent, route.candidate_percent and route.candidate)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.kill()
