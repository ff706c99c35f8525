"""One cell of the table: many rollouts of one scenario at one rate, judged by Serin's own guards and by the peers."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from benchmarks.rollout.peers import MINUTE_S, P95, Flagger, Kayenta, PerRequest, undecided
from benchmarks.rollout.scenarios import MARGIN, Array, Scenario, World
from serin.rollout import betting, guards
from serin.rollout.guards import Arms
from serin.rollout.histogram import WIDTH, quantile_bins, slower_than
from serin.rollout.plan import Plan

ALPHA = 0.01
PLAN = Plan(false_rollback=ALPHA, margin=MARGIN, bad_margin=2 * MARGIN, slo_ms=110.0)
TICK_S = 0.7  # the log is written, and the controller looks

_BINS, _LOWEST = 104, math.log(2)  # of Serin's width, from 2 to 128 ms: enough for what is simulated
_PROMISED = math.ceil((math.log(PLAN.slo_ms or math.inf) - _LOWEST) / WIDTH)
_PEERS_S = 660  # what the peers have not found by then they do not find
_WARM_S = 60  # stable's traffic before the rollout
_ENOUGH = 100  # requests per second of the rest of stable: more would only tell its quantiles a little better


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    scenario: Scenario
    requests_per_s: int
    runs: int
    horizon_s: int
    seed: int = 0
    peers: bool = True  # whether they judge these rollouts too


def simulate(cell: Cell) -> dict[str, list[float]]:
    """For each judge the seconds until it rolled back, one per run; infinite: never."""
    return Simulation(cell).run()


class Simulation:
    def __init__(self, cell: Cell) -> None:
        name = f"{cell.scenario.name} {cell.requests_per_s} {cell.seed}"
        self._random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        self._cell, self._scenario = cell, cell.scenario
        self._world = World(cell.scenario, cell.runs, self._random)
        self._memory = np.zeros((cell.runs, _BINS))
        self._owned: dict[str, Array] = {}
        self._weights = guards.weights(PLAN)
        self._minutes = np.zeros((2, cell.runs, _BINS))
        self.ours = undecided(cell.runs)
        self.flagger = Flagger(cell.runs, 10 * math.exp(0.5 * 1.6449) * (1 + MARGIN))
        self.kayenta = Kayenta(cell.runs)
        self.per_request = PerRequest(cell.runs, ALPHA)

    def run(self) -> dict[str, list[float]]:
        self._warm()
        for second in range(self._cell.horizon_s):
            self._second(second)
            if not self._scenario.null and second >= _PEERS_S and np.isfinite(self.ours).all():
                break
        return {name: decided.tolist() for name, decided in self._found().items()}

    def _found(self) -> dict[str, Array]:
        if not self._cell.peers:
            return {"ours": self.ours}
        return {
            "ours": self.ours,
            "flagger": self.flagger.decided,
            "kayenta": self.kayenta.decided,
            "per request": self.per_request.decided,
        }

    def _warm(self) -> None:
        """Stable's latencies are known when a rollout begins."""
        few = min(_WARM_S * self._cell.requests_per_s, 2000)
        run = np.repeat(np.arange(self._cell.runs), few)
        level = np.full(self._cell.runs, self._scenario.level(0))
        self._memory += self._counted(run, self._world.latencies("stable", run, level, -1000))

    def _second(self, second: int) -> None:
        share = self._scenario.share(second)
        rate = self._cell.requests_per_s * self._scenario.load(second)
        level = self._world.begin(second)
        candidate, control, rest = (
            self._random.poisson(mean, self._cell.runs)
            for mean in (share * rate, share * rate, _rest(share, rate))
        )
        run = np.repeat(np.arange(self._cell.runs), candidate)
        log_ms = self._world.latencies("candidate", run, level, second)
        slow_retry = self._scenario.retries
        if slow_retry:
            log_ms += np.where(self._random.random(len(run)) < slow_retry, math.log(2), 0.0)
        plain = self._counted(run, log_ms)
        arms = Arms(
            candidate=self._counted(run, log_ms - math.log1p(PLAN.margin)),
            candidate_bad=None,
            control=self._stable(control, level, second),
            stable=np.zeros(1),
            candidate_errors=self._world.failures("candidate", candidate),
            control_errors=self._world.failures("stable", control),
            candidate_refused=np.zeros(1),
            control_refused=np.zeros(1),
        )
        stable = arms.control + self._stable(rest, level, second)
        self._judge(second, arms, stable, plain, candidate, share)

    def _judge(
        self, second: int, arms: Arms, stable: Array, plain: Array, requests: Array, share: float
    ) -> None:
        if self._cell.peers:
            self._judge_each(second, arms, stable, share)
            self._judge_minutes(second, plain, arms.control)
        self._owned |= guards.compare(self._owned, self._memory, arms, PLAN)
        shares = [
            np.where(requests > 0, found / np.maximum(requests, 1), target)
            for found, target in (
                (arms.candidate_errors, PLAN.max_error_share),
                (plain[:, _PROMISED:].sum(axis=1), PLAN.max_slow_share),
            )
        ]
        self._owned |= guards.hold_to_promises(self._owned, guards.PROMISES, shares, PLAN)
        total = sum(weight * betting.worth(self._owned[name]) for name, weight in self._weights.items())
        new = np.isinf(self.ours) & (total >= PLAN.rollback_at)
        self.ours[new] = second + 1 + PLAN.watermark_s + TICK_S
        self._memory = guards.remember(self._memory, stable)

    def _judge_minutes(self, second: int, candidate: Array, control: Array) -> None:
        self._minutes += (candidate, control)
        if (second + 1) % MINUTE_S == 0:
            points = [_p95_ms(counts) for counts in self._minutes]
            for peer in (self.flagger, self.kayenta):
                peer.minute(second + 1, *points)
            self._minutes[:] = 0

    def _judge_each(self, second: int, arms: Arms, stable: Array, share: float) -> None:
        limit = quantile_bins(self._memory, (P95,))
        rate = self._cell.requests_per_s * self._scenario.load(second)
        of_both = share * rate / (2 * share * rate + _rest(share, rate))
        candidate_slow, stable_slow = (
            slower_than(counts, limit)[:, 0] for counts in (arms.candidate, stable)
        )
        self.per_request.block(second + 1, candidate_slow, stable_slow, of_both)

    def _stable(self, requests: Array, level: Array, second: int) -> Array:
        run = np.repeat(np.arange(self._cell.runs), requests)
        log_ms = self._world.latencies("stable", run, level, second)
        if self._scenario.retries:
            log_ms += np.where(self._random.random(len(run)) < self._scenario.retries, math.log(2), 0.0)
        return self._counted(run, log_ms)

    def _counted(self, run: Array, log_ms: Array) -> Array:
        bins = np.clip((log_ms - _LOWEST) * (1 / WIDTH), 0, _BINS - 1).astype(np.int64)
        return np.bincount(run * _BINS + bins, minlength=self._cell.runs * _BINS).reshape(-1, _BINS)


def _rest(share: float, rate: float) -> float:
    """Stable's requests per second that are in no arm of equal weight, as far as they are simulated."""
    return min((1 - 2 * share) * rate, _ENOUGH)


def _p95_ms(counts: Array) -> Array:
    """Interpolated within its bin, so that equal points are as rare as they are in a metrics store."""
    up_to = np.cumsum(counts, axis=1)
    wanted = P95 * up_to[:, -1:]
    place = (up_to < wanted).sum(axis=1, keepdims=True).clip(max=_BINS - 1)
    inside = np.take_along_axis(counts, place, axis=1)
    before = np.take_along_axis(up_to, place, axis=1) - inside
    part = (wanted - before) / np.maximum(inside, 1)
    p95: Array = np.exp(_LOWEST + (place + part) * WIDTH)[:, 0]
    return np.where(up_to[:, -1] > 0, p95, np.nan)
