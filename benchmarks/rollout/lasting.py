"""Where the promise of `false_rollback` ends: equal processes whose latency level wanders, by size and duration.

python -m benchmarks.rollout.lasting [--runs 1000]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.rollout.benchmark import run
from benchmarks.rollout.scenarios import HORIZON_S, NULLS, Scenario
from benchmarks.rollout.simulate import Cell

DEVIATIONS, MINUTES, RATES = (0.02, 0.05, 0.1, 0.2), (1, 5, 30), (20, 50, 200)
_PART = 250  # rollouts that are simulated at once


def scenario(deviation: float, minutes: int) -> Scenario:
    equal = next(each for each in NULLS if each.name == "equal")
    name = f"{deviation:.0%}, {minutes} min"
    return replace(equal, name=name, level_s=60.0 * minutes, level_deviation=deviation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    scenarios = [scenario(deviation, minutes) for deviation in DEVIATIONS for minutes in MINUTES]
    cells = [
        Cell(scenario=each, requests_per_s=rate, runs=_PART, horizon_s=HORIZON_S, seed=seed, peers=False)
        for rate in reversed(RATES)
        for each in scenarios
        for seed in range(max(runs // _PART, 1))
    ]
    found = run(cells, say=print)
    print(f"{'rolled back although equal':<28}" + "".join(f"{rate:>8}/s" for rate in RATES))
    for each in scenarios:
        shares = [np.isfinite(found[each.name, rate]["ours"]).mean() for rate in RATES]
        print(f"{each.name:<28}" + "".join(f"{share:>10.3f}" for share in shares))


if __name__ == "__main__":
    main()
