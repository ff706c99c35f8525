"""Measures latencies side by side: contenders take turns, so that other load affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from serin.machine.hardware import core_count

_SECONDS = 0.15  # for each contender
_ROUNDS = (5, 200)
HOPELESS = 20.0  # a contender this many times slower than the fastest is not run again

Run = Callable[[], object]


def race(contenders: Mapping[str, Run], *, seconds: float = _SECONDS) -> dict[str, float]:
    """Returns the median microseconds of each. The first run of each is a warm-up and does not count."""
    first = {}
    for name, run in contenders.items():
        first[name] = _warm(run)
    fastest = min(first.values())
    racing = {name: run for name, run in contenders.items() if first[name] <= HOPELESS * fastest}
    taken: dict[str, list[float]] = {name: [] for name in racing}
    spent, rounds = 0.0, 0
    while rounds < _ROUNDS[0] or (rounds < _ROUNDS[1] and spent < seconds * len(racing)):
        for name, run in racing.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
            spent += taken[name][-1]
        rounds += 1
    found = {name: statistics.median(times) for name, times in taken.items()}
    return {name: 1e6 * found.get(name, first[name]) for name in contenders}


def _warm(run: Run) -> float:
    """Returns the best of a few runs after the first, fewer when they take long."""
    run()
    taken: list[float] = []
    while not taken or (len(taken) < 5 and sum(taken) < 0.05):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def thread_counts() -> tuple[int, ...]:
    """Returns 1, 2, 4 ... up to the cores this process may use, at most 16."""
    cores = min(core_count(), 16)
    return tuple(sorted({1, cores, *(count for count in (2, 4, 8) if count <= cores)}))
