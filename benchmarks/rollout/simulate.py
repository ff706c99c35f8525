"""Simulates one cell of the table: many rollouts of one scenario at one rate, judged by Serin's guards and the
peers."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.rollout.peers import MINUTE_S, P95, Flagger, Kayenta, PerRequest, undecided
from benchmarks.rollout.scenarios import MARGIN, Array, Scenario, World
from serin.evidence import e_process
from serin.evidence.histogram import WIDTH, quantile_bins, slower_than
from serin.rollout.decide import guards
from serin.rollout.decide.guards import Arms
from serin.rollout.decide.plan import Plan

ALPHA = 0.01
PLAN = Plan(false_rollback=ALPHA, margin=MARGIN, bad_margin=2 * MARGIN, slo_ms=110.0)
TICK_S = 0.7  # delay of the log and of the controller's tick
RESTART_S = 15  # a candidate that is restarted has no traffic for this long

_BINS, _LOWEST = 104, math.log(2)  # of Serin's width, from 2 to 128 ms: enough for the simulation
PROMISED = math.ceil((math.log(PLAN.slo_ms or math.inf) - _LOWEST) / WIDTH)
_PEERS_S = 660  # the peers find nothing after that
_WARM_S = 60  # stable's traffic before the rollout
_ENOUGH = 100  # requests per second of the rest of stable: more would hardly improve its quantiles
_FEW = 40  # ... where no peer bets on them, with those of the control


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    scenario: Scenario
    requests_per_s: int
    runs: int
    horizon_s: int
    seed: int = 0
    peers: bool = True  # whether they judge these rollouts too


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """One second of traffic, per run. `plain`: the candidate's latencies without the allowed slowdown subtracted."""

    arms: Arms
    plain: Array
    stable: Array
    requests: Array  # the candidate's


def simulate(cell: Cell) -> dict[str, list[float]]:
    """Returns for each judge the seconds until it rolled back, one per run; infinite: never."""
    return Simulation(cell).run()


class Traffic:
    """Requests of both arms, second by second, and the wealth of the guards."""

    def __init__(self, cell: Cell, plan: Plan, kind: str = "") -> None:
        name = f"{cell.scenario.name} {cell.requests_per_s} {cell.seed}{kind}"
        self._random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        self._cell, self._scenario, self._plan = cell, cell.scenario, plan
        self._world = World(cell.scenario, cell.runs, self._random)
        self._memory = np.zeros((cell.runs, _BINS))
        self._weights = guards.weights(plan)
        self._owned = {
            name: e_process.start(cell.runs)
            for name in (*self._weights, *(guards.reversed_name(q) for q in guards.proven_quantiles(plan)))
        }
        self._warm_s = np.zeros(cell.runs)

    def _warm(self) -> None:
        """Fills stable's latencies as they are known when a rollout begins."""
        few = min(_WARM_S * self._cell.requests_per_s, 2000)
        run = np.repeat(np.arange(self._cell.runs), few)
        level = np.full(self._cell.runs, self._scenario.level(0))
        self._memory += self._counted(run, self._world.latencies("stable", run, level, -1000))

    def _second(self, second: int, share: Array, *, proof: bool = False) -> Second:
        rate = self._cell.requests_per_s * self._scenario.load(second)
        level = self._world.begin(second)
        candidate, control, rest = (
            self._random.poisson(mean) for mean in (share * rate, share * rate, self._rest(share, rate))
        )
        run = np.repeat(np.arange(self._cell.runs), candidate)
        log_ms = self._world.latencies("candidate", run, level, second)
        if self._scenario.retries:
            again = self._random.random(len(run)) < self._scenario.retries
            log_ms += np.where(again, math.log(2), 0.0)
        nobody = np.zeros(self._cell.runs)
        arms = Arms(
            candidate=self._counted(run, self._allowed(log_ms, self._plan.margin, self._plan.tolerance_ms)),
            candidate_bad=self._counted(
                run, self._allowed(log_ms, self._plan.bad_margin, self._plan.bad_tolerance_ms)
            )
            if proof
            else None,
            control=self._stable(control, level, second, "baseline" if self._scenario.baseline else "stable"),
            stable=nobody,
            candidate_errors=self._world.failures("candidate", candidate),
            control_errors=self._world.failures("stable", control),
            candidate_refused=nobody,
            control_refused=nobody,
        )
        stable = arms.control if self._scenario.baseline else arms.control + self._stable(rest, level, second)
        return Second(arms=arms, plain=self._counted(run, log_ms), stable=stable, requests=candidate)

    def _bet(self, seen: Second) -> Array:
        """Returns the combined wealth of all guards after a second, as serin/rollout/decide/evidence.py computes it."""
        warm, arms = self._warm_s >= self._plan.warmup_s, seen.arms
        self._warm_s += seen.requests > 0
        if not warm.all():
            arms = _times(arms, warm[:, None])
        self._owned |= guards.compare(self._owned, self._memory, arms, self._plan)
        shares = [
            np.where(seen.requests > 0, found / np.maximum(seen.requests, 1), target)
            for found, target in (
                (arms.candidate_errors, self._plan.max_error_share),
                (seen.plain[:, PROMISED:].sum(axis=1), self._plan.max_slow_share),
            )
        ]
        self._owned |= guards.hold_to_promises(self._owned, guards.PROMISES, shares, self._plan)
        self._memory = guards.remember(self._memory, seen.stable)
        total: Array = np.zeros(self._cell.runs)
        for name, weight in self._weights.items():
            total += weight * e_process.e_value(self._owned[name])
        return total

    def _forget(self, chosen: Array) -> None:
        """Resets the evidence of the chosen runs."""
        for log_wealth in self._owned.values():
            log_wealth[chosen] = 0.0
        self._warm_s[chosen] = 0

    def _stable(self, requests: Array, level: Array, second: int, arm: str = "stable") -> Array:
        run = np.repeat(np.arange(self._cell.runs), requests)
        log_ms = self._world.latencies(arm, run, level, second)
        if self._scenario.retries:
            log_ms += np.where(self._random.random(len(run)) < self._scenario.retries, math.log(2), 0.0)
        return self._counted(run, log_ms)

    def _counted(self, run: Array, log_ms: Array) -> Array:
        bins = np.clip((log_ms - _LOWEST) * (1 / WIDTH), 0, _BINS - 1).astype(np.int64)
        return np.bincount(run * _BINS + bins, minlength=self._cell.runs * _BINS).reshape(-1, _BINS)

    def _rest(self, share: Array, rate: float) -> Array:
        """Returns stable's simulated requests per second that are in no arm of equal weight."""
        enough = _ENOUGH if self._cell.peers else _FEW - share * rate
        rest: Array = np.clip((1 - 2 * share) * rate, 0.0, np.maximum(enough, 0.0))
        return rest

    @staticmethod
    def _allowed(log_ms: Array, margin: float, tolerance_ms: float) -> Array:
        """Subtracts the allowed slowdown from a candidate's latencies (serin/evidence/histogram.py)."""
        less: Array = log_ms - math.log1p(margin)
        if tolerance_ms:
            less = np.minimum(less, np.log(np.maximum(np.exp(log_ms) - tolerance_ms, 1e-9)))
        return less


class Simulation(Traffic):
    """Rollouts that stay at their step until they are rolled back."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell, replace(PLAN, tolerance_ms=cell.scenario.tolerance_ms))
        self._minutes = np.zeros((2, cell.runs, _BINS))
        self._away_until = np.zeros(cell.runs)  # the candidate is being restarted until then
        self._asked = np.full(cell.runs, not cell.scenario.second_opinion)
        self.ours = undecided(cell.runs)
        self.flagger = Flagger(cell.runs, 10 * math.exp(0.5 * 1.6449) * (1 + MARGIN))
        self.kayenta = Kayenta(cell.runs)
        self.per_request = PerRequest(cell.runs, ALPHA)

    def run(self) -> dict[str, list[float]]:
        self._warm()
        for second in range(self._cell.horizon_s):
            share = self._scenario.share(second)
            seen = self._second(second, share * (self._away_until <= second))
            if self._cell.peers:
                self._judge_each(second, seen, share)
                self._judge_minutes(second, seen.plain, seen.arms.control)
            self._decide(second, self._bet(seen))
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

    def _decide(self, second: int, total: Array) -> None:
        enough = np.isinf(self.ours) & (total >= self._plan.rollback_at)
        again = enough & ~self._asked
        if again.any():
            back = second + 1 + math.ceil(self._plan.watermark_s + TICK_S) + RESTART_S
            self._asked |= again
            self._away_until[again] = back
            self._forget(again)
            self._world.restart(again, back)
        self.ours[enough & ~again] = second + 1 + self._plan.watermark_s + TICK_S

    def _judge_minutes(self, second: int, candidate: Array, control: Array) -> None:
        self._minutes += (candidate, control)
        if (second + 1) % MINUTE_S == 0:
            points = [_p95_ms(counts) for counts in self._minutes]
            for peer in (self.flagger, self.kayenta):
                peer.minute(second + 1, *points)
            self._minutes[:] = 0

    def _judge_each(self, second: int, seen: Second, share: float) -> None:
        limit = quantile_bins(self._memory, (P95,))
        rate = self._cell.requests_per_s * self._scenario.load(second)
        of_both = share * rate / (2 * share * rate + float(self._rest(np.asarray(share), rate)))
        candidate_slow, stable_slow = (
            slower_than(counts, limit)[:, 0] for counts in (seen.arms.candidate, seen.stable)
        )
        self.per_request.block(second + 1, candidate_slow, stable_slow, of_both)


def _times(arms: Arms, factor: Array) -> Arms:
    bad = None if arms.candidate_bad is None else arms.candidate_bad * factor
    return replace(arms, control=arms.control * factor, candidate=arms.candidate * factor, candidate_bad=bad)


def _p95_ms(counts: Array) -> Array:
    """Returns p95 interpolated within its bin, so that ties are as rare as in a metrics store."""
    up_to = np.cumsum(counts, axis=1)
    wanted = P95 * up_to[:, -1:]
    place = (up_to < wanted).sum(axis=1, keepdims=True).clip(max=_BINS - 1)
    inside = np.take_along_axis(counts, place, axis=1)
    before = np.take_along_axis(up_to, place, axis=1) - inside
    part = (wanted - before) / np.maximum(inside, 1)
    p95: Array = np.exp(_LOWEST + (place + part) * WIDTH)[:, 0]
    return np.where(up_to[:, -1] > 0, p95, np.nan)
