"""Hand-written stand-ins for the controller's ports. They outlive a controller, as the real parts do."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.errors import GatewayRejected, ReleaseNotReady, ReplayEnded, RolloutRefused, VerificationFailed
from serin.rollout.decide.advance import ReleaseState
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.shadow import Batch, Difference, Mismatch
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.commands import Inbox
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.record import rollout2decision
from serin.store.artifacts import Endpoint, ModelRoute, Release, parse_label
from serin.store.home_objects import HomeObjects


@dataclass
class FakeClock:
    """`behind` is how much the machine's clock was set back (negative: forwards) while `t` went on evenly."""

    t: float = 1_000_000.0
    behind: float = 0.0
    _taken: float = 0.0

    def now(self) -> float:
        return self.t - self._taken

    def steady(self) -> float:
        return self.t

    def follow(self, *, not_before: float = 0.0) -> None:
        self._taken = self.t - max(self.t - self.behind, not_before)


@dataclass
class FakeRouter:
    """Remembers every push. `refusing` makes it refuse; `watch` is called with each push before it counts."""

    pushes: list[list[ModelRoute]] = field(default_factory=list)
    refusing: bool = False
    active: dict[str, int] = field(default_factory=dict)
    watch: Callable[[Sequence[ModelRoute]], None] = lambda _: None

    def apply(self, routes: Sequence[ModelRoute]) -> None:
        if self.refusing:
            raise GatewayRejected(what="new routes", reason="refusing")
        self.watch(routes)
        self.pushes.append(list(routes))

    def active_requests(self, release: Release) -> int:
        return self.active.get(release.name, 0)

    def route(self, model: str) -> ModelRoute | None:
        return (
            next((route for route in self.pushes[-1] if route.model == model), None) if self.pushes else None
        )

    def shares(self, model: str) -> list[tuple[str, float]]:
        """Who had how much, for each change of it: (release with the most traffic's share, name) without repeats."""
        seen: list[tuple[str, float]] = []
        for push in self.pushes:
            for route in push:
                share = (route.candidate.name if route.candidate else str(route.stable and route.stable.name),
                         route.candidate_percent if route.candidate else 100.0)  # fmt: skip
                if route.model == model and (not seen or seen[-1] != share):
                    seen.append(share)
        return seen


@dataclass
class FakeFleet:
    """Releases are ready `ready_after` looks after their start. `broken` and `wrong` name releases that are."""

    states: dict[Release, ReleaseState] = field(default_factory=dict)
    ready_after: int = 1
    broken: set[str] = field(default_factory=set)  # cannot be started
    wrong: set[str] = field(default_factory=set)  # answer their golden rows wrongly
    unlike: set[str] = field(default_factory=set)  # take or give other tensors than the stable release
    starts: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    _looks: dict[Release, int] = field(default_factory=dict)
    _ports: dict[Release, int] = field(default_factory=dict)

    def start(self, release: Release) -> None:
        if release.name in self.broken:
            raise ReleaseNotReady(release=release.name, reason="broken", log="triton.log")
        if self.states.get(release, "absent") in ("absent", "dead"):
            self.starts.append(release.name)
            self.states[release] = "starting"
            self._looks[release] = 0
            self._ports[release] = 8000 + len(self.starts)

    def state(self, release: Release) -> ReleaseState:
        if self.states.get(release) == "starting" and release in self._looks:
            self._looks[release] += 1
            if self._looks[release] > self.ready_after:
                self.states[release] = "ready"
        return self.states.get(release, "absent")

    def restart(self, release: Release) -> None:
        """It died, and its host had it up again before anybody looked."""
        self._ports[release] += 100

    def instance(self, release: Release) -> int | None:
        return self._ports.get(release)

    def endpoint(self, release: Release) -> Endpoint:
        if release not in self._ports:
            raise ReleaseNotReady(release=release.name, reason="never started", log="triton.log")
        return Endpoint(
            http=f"127.0.0.1:{self._ports[release]}", grpc=f"127.0.0.1:{self._ports[release] + 1000}"
        )

    def verify(self, release: Release) -> None:
        if release.name in self.wrong:
            raise VerificationFailed(release=release.name, reason="score 0.1 instead of 0.9")

    def check_fits(self, release: Release, stable: Release, *, share: bool) -> None:
        if release.name in self.unlike:
            raise ReleaseNotReady(release=release.name, reason=f"it is not like {stable.name}", log="-")

    def stop(self, release: Release) -> None:
        if release in self.states:
            self.stops.append(release.name)
            del self.states[release]
            self._ports.pop(release, None)

    def running(self) -> list[Release]:
        return sorted(self.states)

    def die(self, release: Release) -> None:
        self.states[release] = "dead"

    def hang(self, release: Release) -> None:
        """Lives, but is not ready any more."""
        self.states[release] = "starting"
        del self._looks[release]


@dataclass
class FakeJudge:
    """Passes a step after `step_s` and a bake after `bake_s`, unless `verdicts` has a word for the step's weight."""

    step_s: float = 2.0
    bake_s: float = 3.0
    verdicts: dict[float, Verdict] = field(default_factory=dict)
    slow_by_chance: bool = False  # fails by latency alone, unless it was started again

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        needed = self.bake_s if rollout.phase is Phase.BAKING else self.step_s
        verdict = Verdict.PASS if t - rollout.since >= needed else Verdict.WAIT
        verdict = self.verdicts.get(rollout.weight_percent, verdict)
        if self.slow_by_chance and not rollout.restarted:
            verdict = Verdict.FAIL
        looks = rollout.evidence.get("looks", 0) + 1
        return Judgement(
            verdict=verdict,
            reason=f"said {verdict}",
            evidence={"looks": looks},
            latency_alone=self.slow_by_chance,
        )


@dataclass
class FakeReplay:
    """One report for each look: a batch of `rows` rows each, until the records are used up."""

    records: FakeReplayer
    at: int
    stopped: bool = False

    def take(self) -> list[dict[str, Any]]:
        if self.records.dies_at == self.at:
            self.records.dies_at = None
            raise ReplayEnded(reason="their process exited with code -9")
        if self.records.unable:
            return [{"unable": self.records.unable}]
        if self.at * self.records.rows >= self.records.recorded:
            return [{"waiting": "no request of flights-v1 is recorded yet"}]
        self.at += 1
        self.records.sent.append(self.at)
        return [self.records.batch(self.at).to_json()]

    def stop(self) -> None:
        self.stopped = True


@dataclass
class FakeReplayer:
    """Sends `recorded` rows, `rows` with each look. `wrong_at`: the batch with a row that is not served as computed."""

    recorded: int = 10_000
    rows: int = 100
    wrong_at: int | None = None
    failed: int = 0  # requests of each batch
    us: float = 2000.0
    away: float = 0.01  # the mean difference from the live version's scores, which are 0.5
    dies_at: int | None = None
    unable: str = ""
    refusal: str = ""
    sent: list[int] = field(default_factory=list)
    started: list[FakeReplay] = field(default_factory=list)

    def check(self, rollout: Rollout) -> None:
        if self.refusal:
            raise RolloutRefused(model=rollout.model, command="start", reason=self.refusal)

    def start(self, rollout: Rollout, place: Mapping[str, Any]) -> FakeReplay:
        self.started.append(FakeReplay(self, place.get("batch", 0)))
        return self.started[-1]

    def batch(self, number: int) -> Batch:
        difference = Difference(
            rows=self.rows, live=self.rows / 2, signed=0.0, absolute=self.rows * self.away
        )
        small = Difference(rows=1, live=0.5, absolute=0.5)
        wrong = Mismatch(
            request="r17", row=0, segments=("carrier=AA",), output="score", served="0.4", computed="0.8",
            values={"carrier": "AA", "temp": "nan"},
        )  # fmt: skip
        return Batch(
            requests=self.rows, failed=self.failed, us=(self.us,) * (self.rows - self.failed), rows=self.rows,
            compared=self.rows, unsteady=0, segments={"all rows": difference, f"carrier={number}": small},
            place={"batch": number}, mismatch=wrong if number == self.wrong_at else None,
            failure="no" if self.failed else "",
        )  # fmt: skip


@dataclass
class FakeVersions:
    published: dict[str, Sequence[int | str]] = field(default_factory=dict)
    names: dict[str, dict[str, int | str]] = field(default_factory=dict)

    def editions(self, model: str, version: int) -> list[int]:
        labels = (parse_label(str(known)) for known in self.published.get(model, []))
        return [label[1] for label in labels if label and label[0] == version]

    def aliases(self, model: str) -> dict[str, int | str]:
        return dict(self.names.get(model, {}))

    def aliased(self, model: str) -> dict[str, Release]:
        found = {alias: parse_label(str(label)) for alias, label in self.names.get(model, {}).items()}
        return {
            alias: Release(model=model, version=label[0], edition=label[1])
            for alias, label in found.items()
            if label
        }

    def set_alias(
        self, model: str, alias: str, version: str | None, *, check: Callable[[], None] | None = None
    ) -> None:
        if check is not None:
            check()
        aliases = self.names.setdefault(model, {})
        if version is None:
            aliases.pop(alias, None)
        else:
            aliases[alias] = int(version) if version.isdigit() else version


class Crash(BaseException):
    """The process is gone. No `except` of the controller's may see it."""


@dataclass
class Bomb:
    """Goes off at the `at`-th effect, before or after it is done. `at` None: never, it only counts."""

    at: int | None = None
    after: bool = False
    count: int = 0
    log: list[str] = field(default_factory=list)

    def around(self, name: str, effect: Callable[[], Any]) -> Any:
        self.count += 1
        self.log.append(name)
        if self.count == self.at and not self.after:
            raise Crash(name)
        result = effect()
        if self.count == self.at:
            raise Crash(name)
        return result


class Mined:
    """Any port, with a bomb around each of the methods that change something."""

    def __init__(self, port: Any, bomb: Bomb, *effects: str, wrap: str | None = None) -> None:
        self._port, self._bomb, self._effects, self._wrap = port, bomb, effects, wrap

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if name == self._wrap:
            return lambda *args: Mined(method(*args), self._bomb, *self._effects)
        if name not in self._effects:
            return method
        return lambda *args, **named: self._bomb.around(name, lambda: method(*args, **named))


def distinct(values: Sequence[Any]) -> Iterator[Any]:
    """Without repeats of the one before."""
    for index, value in enumerate(values):
        if index == 0 or values[index - 1] != value:
            yield value


class Leading:
    """The leadership of a process that is the only one."""

    def __init__(self) -> None:
        self.holder = f"test-{secrets.token_hex(4)}"

    def check(self, term: int) -> None: ...

    def lose(self, term: int) -> None: ...


def home_journals(home: Path, **settings: Any) -> StoreJournals:
    return StoreJournals(HomeObjects(home), Leading(), 1, **settings)


def home_inbox(home: Path) -> Inbox:
    return Inbox(HomeObjects(home))


def go_live(home: Path, release: Release, t: float, **facts: Any) -> None:
    """Writes into the journal that a release was promoted, or what `facts` say of its rollout."""
    usual = {
        "stable": None,
        "previous": None,
        "phase": Phase.PROMOTED,
        "began": t,
        "since": t,
        "evidence_from": t,
    }
    decided = Rollout(id=f"r{release.version}", candidate=release, plan=Plan(), **(usual | facts))
    home_journals(home).open(release.model).append(rollout2decision(decided, t))
