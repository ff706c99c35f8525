"""The scenarios in which rollouts are simulated: traffic, latency and failures, second by second.

A request's latency is 10 ms times a lognormal draw. In every null the candidate is exactly as slow as the margin
allows; in scenarios about errors both arms fail alike.

In LASTING scenarios each process has a latency level that lasts for minutes. Two processes of the same version then
differ, and no judge can distinguish a process from its version. Nothing is promised there; the remedies are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
MARGIN = 0.10
HORIZON_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    null: bool  # a rollback would be false
    slower: float = 1.0 + MARGIN  # the candidate's latencies, times this
    errors: float = 0.0  # share of requests that fail, in both arms
    candidate_errors: float = 0.0  # ... more, in the candidate
    retries: float = 0.0  # share that is retried: counts as failed, takes twice as long
    tail: float = 0.0  # share of the candidate's requests that are three times slower
    spread: float = 0.5  # of the latency's logarithm
    heavy: bool = False  # a tail like Student's t
    pause_s: float = 0.0  # a process pauses for this long ...
    pause_every_s: float = 0.0  # ... on average this often, independently per process
    bursts: bool = False  # all latencies four times longer for 3 s, once a minute, in both arms
    batches: bool = False  # one batch of 8 requests in 20 is three times slower as a whole
    drift: bool = False  # latencies double over the horizon while the weight rises from 1 to 50%
    diurnal: bool = False  # traffic between a fifth and nine fifths, latencies with it
    cold_s: float = 0.0  # a candidate's process is twice as slow for this long
    tolerance_ms: float = 0.0  # also allowed by the plan, and a null uses all of it
    level_s: float = 0.0  # each process has a level that lasts about this long ...
    level_deviation: float = 0.10  # ... and deviates by so much
    processes: int = 1  # in each arm
    baseline: bool = False  # the control is a second process of the stable version
    second_opinion: bool = False  # the candidate is restarted and judged again before it is rolled back

    def share(self, second: int) -> float:
        """Returns the candidate's share of traffic."""
        if not self.drift:
            return 0.10
        return (0.01, 0.05, 0.25, 0.50)[min(4 * second // HORIZON_S, 3)]

    def load(self, second: int) -> float:
        return 1 + 0.8 * math.sin(2 * math.pi * second / 600) if self.diurnal else 1.0

    def level(self, second: int) -> float:
        """Returns what is added to every latency's logarithm since the start, for both arms."""
        slow = math.log(2) * second / HORIZON_S if self.drift else 0.0
        return slow + (0.5 * math.sin(2 * math.pi * second / 600) if self.diurnal else 0.0)


_BOUNDARY = Scenario(name="boundary", null=True)
_EQUAL = Scenario(name="equal", null=True, slower=1.0)

NULLS = (
    _EQUAL,
    _BOUNDARY,
    replace(_BOUNDARY, name="drift + ramp", drift=True),
    replace(_BOUNDARY, name="common bursts", bursts=True),
    replace(_BOUNDARY, name="pauses of .3 s", pause_s=0.3, pause_every_s=100),
    replace(_BOUNDARY, name="pauses of 1 s", pause_s=1.0, pause_every_s=300),
    replace(_BOUNDARY, name="pauses of 3 s", pause_s=3.0, pause_every_s=600),
    replace(_BOUNDARY, name="slow batches", batches=True),
    replace(_BOUNDARY, name="diurnal load", diurnal=True),
    replace(_BOUNDARY, name="heavy tails", heavy=True),
    replace(_EQUAL, name="0.1% errors", errors=0.001),
    replace(_EQUAL, name="0.5% retries", retries=0.005),
    replace(_BOUNDARY, name="cold for 10 s", cold_s=10.0),
    replace(_BOUNDARY, name="at the tolerance", tolerance_ms=2.2),
)
WORSE = (
    Scenario(name="x1.2", null=False, slower=1.2),
    Scenario(name="x1.3", null=False, slower=1.3),
    Scenario(name="x1.5", null=False, slower=1.5),
    Scenario(name="x2", null=False, slower=2.0),
    Scenario(name="5% x3", null=False, slower=1.0, tail=0.05),
    Scenario(name="1% fail", null=False, slower=1.0, candidate_errors=0.01),
)
_OFFERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    (", 4 processes", {"processes": 4}),
    (", baseline", {"baseline": True}),
    (", 2nd opinion", {"second_opinion": True}),
    (", both", {"baseline": True, "second_opinion": True}),
)
LASTING = tuple(
    replace(kind, name=f"{kind.name}, {minutes} min{offer}", level_s=60.0 * minutes, **how)
    for minutes in (1, 5)
    for kind in (_EQUAL, _BOUNDARY)
    for offer, how in _OFFERS
)
PRICE = tuple(
    Scenario(name=f"x{slower:g}, 2nd opinion", null=False, slower=slower, second_opinion=True)
    for slower in (1.3, 1.5, 2.0)
)

_ARMS = ("stable", "candidate", "baseline")


class World:
    """State that lasts from second to second, for all runs at once: bursts, pauses, levels and the age of processes."""

    def __init__(self, scenario: Scenario, runs: int, random: np.random.Generator) -> None:
        self._scenario, self._random = scenario, random
        self._burst_until = np.zeros(runs)
        self._pauses = {arm: (np.zeros(runs), np.zeros(runs)) for arm in ("stable", "candidate")}
        self._levels = {arm: self._draw_levels(runs) for arm in _ARMS}
        self._started = np.zeros(runs)

    def restart(self, chosen: Array, at: float) -> None:
        """Replaces the processes of the candidate and its baseline in the chosen runs, from second `at` on."""
        self._started[chosen] = at
        for arm in ("candidate", "baseline"):
            self._levels[arm][chosen] = self._draw_levels(int(chosen.sum()))

    def _draw_levels(self, runs: int) -> Array:
        drawn: Array = self._scenario.level_deviation * self._random.standard_normal(
            (runs, self._scenario.processes)
        )
        return drawn

    def begin(self, second: int) -> Array:
        """Returns what is added to all latencies of this second, per run."""
        runs = len(self._burst_until)
        if self._scenario.level_s:
            stays = math.exp(-1 / self._scenario.level_s)
            for arm, level in self._levels.items():
                self._levels[arm] = stays * level + math.sqrt(1 - stays**2) * self._draw_levels(runs)
        if self._scenario.bursts:
            starts = self._random.random(runs) < 1 / 60
            self._burst_until = np.where(starts, second + 3.0, self._burst_until)
        if self._scenario.pause_s:
            for start, end in self._pauses.values():
                begins = (self._random.random(runs) < 1 / self._scenario.pause_every_s) & (end <= second)
                at = second + self._random.random(runs)
                start[begins] = at[begins]
                end[begins] = at[begins] + self._scenario.pause_s
        bursting: Array = np.where(self._burst_until > second, math.log(4), 0.0)
        return bursting + self._scenario.level(second)

    def latencies(self, arm: str, run: Array, level: Array, second: int) -> Array:
        """Returns logarithms of milliseconds, one for each entry of `run` (sorted)."""
        scenario, random, size = self._scenario, self._random, len(run)
        draw = (
            random.standard_t(3, size) * 0.6 if scenario.heavy else random.standard_normal(size, np.float32)
        )
        log_ms: Array = draw * scenario.spread
        log_ms += math.log(10) + (level[run] if scenario.bursts else level[0])
        if scenario.batches:
            log_ms += np.where(self._slow_batch(run), math.log(3), 0.0)
        if scenario.level_s:
            which = random.integers(scenario.processes, size=size) if scenario.processes > 1 else 0
            log_ms += self._levels[arm][run, which]
        if arm == "candidate":
            log_ms = self._slow_down(log_ms, run, second)
        if scenario.pause_s:
            start, end = self._pauses[arm]
            arrival = second + random.random(size)
            waits = (arrival >= start[run]) & (arrival < end[run])
            left_ms = np.where(waits, (end[run] - arrival) * 1000, 0.0)
            log_ms = np.log(np.exp(log_ms) + left_ms)
        return log_ms

    def _slow_down(self, log_ms: Array, run: Array, second: int) -> Array:
        """Makes the candidate's requests slower than stable's, as the scenario says."""
        scenario = self._scenario
        slower = log_ms + math.log(scenario.slower)
        if scenario.tolerance_ms:
            slower = np.maximum(slower, np.log(np.exp(log_ms) + scenario.tolerance_ms))
        if scenario.tail:
            slower += np.where(self._random.random(len(run)) < scenario.tail, math.log(3), 0.0)
        if scenario.cold_s:
            slower += np.where(second - self._started[run] < scenario.cold_s, math.log(2), 0.0)
        return slower

    def _slow_batch(self, run: Array) -> Array:
        position = np.arange(len(run)) - np.searchsorted(run, run)
        batch = run * 4096 + position // 8
        _, which = np.unique(batch, return_inverse=True)
        slow: Array = (self._random.random(which.max(initial=0) + 1) < 0.05)[which]
        return slow

    def failures(self, arm: str, requests: Array) -> Array:
        """Returns how many of `requests` fail, per run."""
        share = self._scenario.errors + self._scenario.retries
        if arm == "candidate":
            share += self._scenario.candidate_errors
        failed: Array = self._random.binomial(requests, share) if share else np.zeros_like(requests)
        return failed
