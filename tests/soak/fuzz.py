"""python -m tests.soak.fuzz: 20,000 requests that no good client would send, drawn anew each time.

Prints what they were answered and what the processes held after each thousand. Fails when one of them died, a request
was answered with a server's error, a good request beside them failed, or something grew.
"""

import argparse
import random
import sys
import time
from collections import Counter

from tests.e2e.fuzz_gateway import Footprint, footprint, fuzz, healthy_clients, stalled_clients
from tests.e2e.serving_stack import running_stack

ROUND = 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--number", type=int, default=random.randrange(10**6), help="of the first round")
    parser.add_argument("--backend", default="auto", help="what in Triton runs the model")
    chosen = parser.parse_args()
    began, seen, wrong, examples = time.monotonic(), Counter[str](), Counter[str](), dict[str, object]()
    held: list[Footprint] = []
    with (
        running_stack(backend=chosen.backend) as stack,
        healthy_clients(stack) as healthy,
        stalled_clients(stack.port, 20),
    ):
        before = footprint(stack)
        for number in range(chosen.number, chosen.number + chosen.requests // ROUND):
            found = fuzz(stack, ROUND, number=number)
            seen += found.seen
            wrong += found.wrong
            examples = {**found.examples, **examples}
            held.append(footprint(stack))
            print(f"[{time.monotonic() - began:5.0f} s] number {number}: {held[-1]}", flush=True)
    for name, count in wrong.most_common():
        print(f"WRONG, {count} times: {name}\n  {examples[name]}")
    print(f"answers: {dict(sorted(seen.items()))}")
    faults = {
        "answered with a server's error or not at all": sum(wrong.values()),
        "processes that are not those of the beginning": int(held[-1].pids != before.pids),
        "good requests that failed": len(healthy.failed),
        "descriptors more than after the first round": max(0, held[-1].files - held[0].files - 50),
        "MB of shared memory more": max(0, round(held[-1].shared_mb - held[0].shared_mb - 8)),
        "MB of memory more": max(0, round(held[-1].rss_mb - held[0].rss_mb - 100)),
    }
    print(
        f"requests={sum(seen.values())} wrong={sum(wrong.values())} healthy={healthy.answered} "
        f"healthy_failed={len(healthy.failed)} slowest_healthy_ms={healthy.slowest_ms:.0f} "
        f"rss_growth_mb={held[-1].rss_mb - held[0].rss_mb:.1f} descriptors_growth={held[-1].files - held[0].files} "
        f"shared_growth_mb={held[-1].shared_mb - held[0].shared_mb:.1f} seconds={time.monotonic() - began:.0f}"
    )
    for words, count in faults.items():
        if count:
            print(f"FAILED: {words}: {count}")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
