"""python -m tests.soak.resets: 10,000 gRPC calls that are given up at every moment, and the memory that stays.

Three ways: at Triton itself on one connection that stays open; through the gateway on connections that close; and 300
calls of 28 MB through the gateway. Before the last come 100 calls of that size that are answered: Triton keeps the
buffers of some requests for the next ones, as large as they were. Prints a curve of resident memory. Fails when a
process exited, when a good call failed after that, or when memory grew in the last two thirds of a way.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.fuzz_gateway import footprint
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.reset_clients import MOMENTS, Memory, Resetter, give_up_calls, memory, padded_frame
from tests.e2e.serving_stack import Stack, running_stack

ANSWERED, LARGE, LARGE_BYTES = 100, 300, 28_000_000
BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    resets: int
    every: int  # resets between two looks at the memory
    allowed_mb: float  # from the first third to the end
    give_up: Callable[[int, int], object]  # so many calls; a number that draws them
    warm_up: Callable[[], object] = lambda: None


def ways(stack: Stack, client: Resetter, resets: int) -> list[Way]:
    rest = resets - LARGE
    large, middle, good = padded_frame(LARGE_BYTES), padded_frame(BYTES), good_frame()

    def at_triton(count: int, number: int) -> None:
        draw = random.Random(number)
        for _ in range(count):
            client.give_up(middle if draw.random() < 0.5 else good, draw.choice(MOMENTS))
        client.settle()

    def large_ones(count: int, number: int) -> None:
        give_up_calls(stack.port, count, number=number, frame=large, moments=("computing", "whole but open"))

    def answered() -> None:
        give_up_calls(stack.port, ANSWERED, number=1, frame=large, moments=("answered",))
        print(
            f"after {ANSWERED} calls of 28 MB that were answered: {memory(stack, stack.stable)}", flush=True
        )

    def by_gateway(count: int, number: int) -> None:
        give_up_calls(stack.port, count, number=number, frame=middle if number % 2 else good)

    return [
        Way("Triton, 0.2 MB", rest // 2, 500, 15.0, at_triton),
        Way("gateway, 0.2 MB", rest - rest // 2, 500, 15.0, by_gateway),
        Way("gateway, 28 MB", LARGE, 20, 100.0, large_ones, answered),
    ]


def run(stack: Stack, way: Way, done: int, seed: int) -> list[Memory]:
    """The memory before, and after each round; one line for each."""
    way.warm_up()
    held = [memory(stack, stack.stable)]
    for start in range(0, way.resets, way.every):
        count = min(way.every, way.resets - start)
        began = time.monotonic()
        way.give_up(count, seed + start // way.every)
        held.append(memory(stack, stack.stable))
        seconds = time.monotonic() - began
        print(f"{way.name:16} {done + start + count:6} resets: {held[-1]} ({seconds:.1f} s)", flush=True)
    return held


def grown(held: list[Memory]) -> Memory:
    """From the most in the first third to the end."""
    first = held[: max(2, len(held) // 3)]
    return Memory(
        envoy=held[-1].envoy - max(each.envoy for each in first),
        triton=held[-1].triton - max(each.triton for each in first),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.resets", description=__doc__)
    parser.add_argument("--resets", type=int, default=10_000)
    parser.add_argument("--number", type=int, default=random.randrange(10**6), help="draws the moments")
    parser.add_argument("--backend", default="auto", help="what in Triton runs the model")
    chosen = parser.parse_args()
    faults, done = [], 0
    with running_stack(backend=chosen.backend) as stack:
        began = footprint(stack).pids
        print(f"number {chosen.number}; before: {memory(stack, stack.stable)}")
        client = Resetter(
            int(stack.endpoints()[stack.stable.name].grpc.rpartition(":")[2]), random.Random(chosen.number)
        )
        for way in ways(stack, client, chosen.resets):
            held = run(stack, way, done, chosen.number)
            done += way.resets
            growth = grown(held)
            print(f"{way.name:16} grew after its first third by: {growth}")
            if max(growth.envoy, growth.triton) > way.allowed_mb:
                faults.append(f"{way.name}: more than {way.allowed_mb:.0f} MB more: {growth}")
        client.settle()
        client.close()
        if footprint(stack).pids != began:
            faults.append("a process is another one than at the start")
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"resets={done} faults={len(faults)}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
