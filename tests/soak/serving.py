"""python -m tests.soak.serving --minutes 30: steady load by HTTP and gRPC on two releases, and what the processes hold.

Fails when a request failed, or when resident memory, descriptors or shared memory grew: by a line through the samples
after the warm-up, over the whole of that time.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from serin.serving.tuning.load import LoadResult
from tests.e2e.fuzz_gateway import Footprint, footprint
from tests.e2e.serving_load import loading, outcome
from tests.e2e.serving_stack import Stack, running_stack

CLIENTS = 4
CONNECTIONS = 16.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Over the time after the warm-up, by a straight line; and the level it started from."""

    what: str
    unit: str
    grew: float
    level: float
    allowed: float

    def __str__(self) -> str:
        verdict = "" if self.grew <= self.allowed else "  TOO MUCH"
        return f"{self.what}: {self.grew:+.1f} {self.unit} from {self.level:.1f} (allowed {self.allowed:.1f}){verdict}"


@dataclass(frozen=True, slots=True)
class Soaked:
    results: list[LoadResult]
    growths: tuple[Growth, ...]
    restarted: bool

    @property
    def faults(self) -> list[str]:
        failed = [f"failed: {result.errors}" for result in self.results if result.failed]
        grown = [str(growth) for growth in self.growths if growth.grew > growth.allowed]
        return failed + grown + (["a process is another one than at the start"] if self.restarted else [])


def soak(
    stack: Stack,
    seconds: float,
    *,
    every_s: float,
    memory_share: float,
    warm_up: float = 0.25,
    say: Callable[[str], None] = lambda _: None,
) -> Soaked:
    """`memory_share`: of its level, by which resident memory may grow. `warm_up`: the part of the time in which pools
    fill and regions of shared memory grow to the size of a batch."""
    stack.route(50)
    done = threading.Event()
    times: list[float] = []
    held: list[Footprint] = []
    begin = time.monotonic()
    with loading(
        stack, ["http", "grpc"], clients=CLIENTS, seconds=seconds + 600, stop=done.is_set
    ) as results:
        try:
            while (now := time.monotonic() - begin) < seconds:
                times.append(now)
                held.append(footprint(stack))
                say(f"{held[-1]}")
                time.sleep(min(every_s, max(seconds - now, 0.01)))
        finally:
            done.set()
    first = sum(now < warm_up * seconds for now in times)
    restarted = held[first].pids != held[-1].pids
    return Soaked(results, growths(times[first:], held[first:], memory_share), restarted)


def growths(times: Sequence[float], held: Sequence[Footprint], memory_share: float) -> tuple[Growth, ...]:
    """Some descriptors are allowed: the gateway opens a connection more when requests happen to come together."""
    figures = {
        ("resident memory", "MB"): [each.rss_mb for each in held],
        ("descriptors", ""): [float(each.files) for each in held],
        ("shared memory", "MB"): [each.shared_mb for each in held],
    }
    shares = {"resident memory": memory_share, "descriptors": 0.05, "shared memory": 0.05}
    found = []
    for (what, unit), values in figures.items():
        slope, start = np.polyfit(np.array(times) - times[0], values, 1)
        level = max(float(start), 1.0)
        allowed = max(shares[what] * level, CONNECTIONS if what == "descriptors" else 0.0)
        found.append(Growth(what, unit, float(slope) * (times[-1] - times[0]), level, allowed))
    return tuple(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.serving", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--backend", default="auto", help="what in Triton runs the model")
    chosen = parser.parse_args()
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    with running_stack(backend=chosen.backend) as stack:
        soaked = soak(stack, chosen.minutes * 60, every_s=10.0, memory_share=0.02, say=say)
    print(outcome(soaked.results))
    print(*soaked.growths, sep="\n")
    for fault in soaked.faults:
        print(f"FAULT: {fault}")
    return 1 if soaked.faults else 0


if __name__ == "__main__":
    sys.exit(main())
