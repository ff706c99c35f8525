"""Runs contenders in turns and checks each answer before its time counts. Only ratios are judged, never seconds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from benchmarks.clock import Watch
from benchmarks.machine import core_count

Role = Literal["ours", "peer", "limit"]
Each = TypeVar("Each")
MIN_REPETITIONS = 7
RARE_EVERY = 3  # rounds
SLOW_OURS = (
    "SERIN_BENCHMARK_SLOW_OURS"  # 0.2: our contender takes a fifth more CPU time, to try `make bench-check`
)


class Unequal(Exception):
    """Two contenders gave different answers: their times mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One timed run of one contender."""

    seconds: float
    peak_bytes: int
    cpu_s: float = 0.0  # of the contender's threads and children
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who takes part in a benchmark and for how many rounds, where not everything is asked for."""

    contenders: frozenset[str] | None = None
    cases: frozenset[str] | None = None
    repetitions: int = MIN_REPETITIONS
    times_the_data: float = 1  # in a lap: longer ones vary less
    limit_times: int = 1  # a limit that takes a fraction of our time does its work so often in a lap
    threads: int | None = None  # one: threads that wait for each other use CPU time

    def of(self, contenders: Mapping[str, Each]) -> dict[str, Each]:
        """Returns the contenders that take part."""
        wanted = self.contenders
        return {name: one for name, one in contenders.items() if wanted is None or name in wanted}

    @property
    def cores(self) -> int:
        """Returns the threads of each contender."""
        return self.threads or core_count()

    def has_case(self, name: str) -> bool:
        return self.cases is None or name in self.cases


EVERYTHING = Choice()


class Runner(Protocol):
    def run(self, request: Mapping[str, Any]) -> Lap: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All laps of one contender, in the order they were run."""

    role: Role
    laps: tuple[Lap, ...]
    rounds: tuple[int, ...] = ()  # of each lap; empty: it took part in all of them

    @property
    def seconds(self) -> list[float]:
        return [lap.seconds for lap in self.laps]

    @property
    def cpu_seconds(self) -> list[float]:
        return [lap.cpu_s for lap in self.laps]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak_bytes(self) -> int:
        return max(lap.peak_bytes for lap in self.laps)

    def times_as_long_as(self, other: Result) -> float:
        """The median over rounds of own seconds over the other's of the same round: drift of the machine cancels."""
        if not self.rounds and not other.rounds:
            return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))
        own, theirs = self._by_round(), other._by_round()
        return statistics.median(own[each] / theirs[each] for each in own.keys() & theirs.keys())

    def _by_round(self) -> dict[int, float]:
        return dict(zip(self.rounds or range(1, len(self.laps) + 1), self.seconds, strict=True))


def race(
    runners: Mapping[str, tuple[Role, Runner]],
    request: Callable[[str, int], Mapping[str, Any]],
    accept: Callable[[str, Mapping[str, Any], Lap], None],
    *,
    repetitions: int = MIN_REPETITIONS,
    rare: Collection[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Result]:
    """Every contender once per round, each round begun by another one; the first round warms up and is not counted.

    `request(name, round)` is what the contender is asked, `accept` raises Unequal when its answer is not the right one.
    `rare`: contenders so slow that they take part in every third round only, and in the warm-up.
    """
    if repetitions < MIN_REPETITIONS:
        raise ValueError(f"{repetitions} repetitions are too few for a ratio; run at least {MIN_REPETITIONS}")
    names = list(runners)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for turn in range(repetitions + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name in rare and turn > 0 and turn % RARE_EVERY != 1:
                continue
            asked = request(name, turn)
            role, runner = runners[name]
            lap = slowed(runner.run(asked)) if role == "ours" else runner.run(asked)
            accept(name, asked, lap)
            if turn > 0:
                laps[name].append(lap)
        say(f"round {turn} of {repetitions}" + (" (warm-up)" if turn == 0 else ""))
    shared = tuple(turn for turn in range(1, repetitions + 1) if turn % RARE_EVERY == 1)
    return {
        name: Result(role=runners[name][0], laps=tuple(laps[name]), rounds=shared if name in rare else ())
        for name in names
    }


def slowed(lap: Lap) -> Lap:
    """Adds work to a lap where a deliberate slowdown is asked for: CPU time, and the rest of the time asleep."""
    share = float(os.environ.get(SLOW_OURS) or 0)
    if not share:
        return lap
    watch, spent = Watch(), {"cpu_s": 0.0}
    while spent["cpu_s"] < share * lap.cpu_s:
        spent = watch.read()
    time.sleep(max(0.0, share * lap.seconds - watch.read()["seconds"]))
    added = watch.read()
    return replace(lap, seconds=lap.seconds + added["seconds"], cpu_s=lap.cpu_s + added["cpu_s"])
