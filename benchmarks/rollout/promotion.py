"""Simulates how long an equal candidate takes through all steps of a plan: the price of waiting for evidence."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from benchmarks.rollout.peers import undecided
from benchmarks.rollout.scenarios import Array, Scenario
from benchmarks.rollout.simulate import PROMISED, TICK_S, Cell, Second, Traffic
from serin.evidence import e_process
from serin.rollout.decide import guards
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.verdict import PASS_AT

PLAN = Plan(slo_ms=110.0)  # the defaults of a spec without a rollout section
EQUAL = Scenario(name="equal", null=True, slower=1.0)


def seconds_to_promote(
    scenario: Scenario = EQUAL, *, requests_per_s: int = 100, runs: int = 200, horizon_s: int = 1200
) -> list[float]:
    """Returns seconds from the first request until the candidate has all traffic, without the bake; inf if not by the
    horizon."""
    cell = Cell(scenario=scenario, requests_per_s=requests_per_s, runs=runs, horizon_s=horizon_s, peers=False)
    found: list[float] = Promotion(cell, PLAN).run().tolist()
    return found


class Promotion(Traffic):
    """Rollouts that advance through the steps. A second is judged after the wait for late requests and the log."""

    def __init__(self, cell: Cell, plan: Plan) -> None:
        super().__init__(cell, plan, " promoted")
        self._step = np.zeros(cell.runs, dtype=int)
        self._since, self._compared, self._seen, self._slow = (np.zeros(cell.runs) for _ in range(4))
        self.passed = [undecided(cell.runs) for _ in plan.steps[:-1]]  # when each step passed
        self.back = undecided(cell.runs)

    @property
    def promoted(self) -> Array:
        return self.passed[-1]

    def run(self) -> Array:
        """Returns when each rollout was promoted."""
        self._warm()
        shares = np.array(self._plan.steps[:-1]) / 100
        waiting: deque[Second] = deque()
        late = math.ceil(self._plan.watermark_s + TICK_S)
        for second in range(self._cell.horizon_s):
            waiting.append(self._second(second, shares[self._step], proof=True))
            if len(waiting) > late:
                self._decide(second + 1, waiting.popleft())
            if np.isfinite(np.minimum(self.promoted, self.back)).all():
                break
        return self.promoted

    def _decide(self, now: int, seen: Second) -> None:
        """Decides as serin/rollout/decide/verdict.py does."""
        warm = self._warm_s >= self._plan.warmup_s
        total = self._bet(seen)
        self._compared += seen.requests * warm
        self._seen += seen.requests
        self._slow += seen.plain[:, PROMISED:].sum(axis=1)
        going = np.isinf(self.promoted) & np.isinf(self.back)
        self.back[going & (total >= self._plan.rollback_at)] = now
        last = self._step == len(self.passed) - 1
        passes = going & np.isinf(self.back) & (now - self._since >= self._plan.step_s)
        passes &= (self._compared >= self._plan.min_requests) & (total <= PASS_AT)
        passes &= (self._slow <= self._plan.max_slow_share * self._seen) & (~last | self._proven())
        for step, when in enumerate(self.passed):
            when[passes & (self._step == step)] = now
        self._step[passes & ~last] += 1
        self._since[passes] = now
        for counts in (self._compared, self._seen, self._slow):
            counts[passes] = 0

    def _proven(self) -> Array:
        names = [guards.reversed_name(quantile) for quantile in guards.proven_quantiles(self._plan)]
        worths = np.array([e_process.e_value(self._owned[name]) for name in names])
        return np.asarray((worths >= self._plan.promote_at).all(axis=0))
