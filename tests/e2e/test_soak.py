"""Seconds of load on two releases; `make soak` does half an hour of the same."""

from __future__ import annotations

import pytest

from tests.e2e.fuzz_gateway import Footprint
from tests.e2e.serving_load import outcome
from tests.e2e.serving_stack import running_stack
from tests.soak.serving import growths, soak

SECONDS = 16.0


def test_load_fails_nothing_and_leaves_nothing_behind() -> None:
    with running_stack() as stack:
        soaked = soak(stack, SECONDS, every_s=0.25, memory_share=0.05, warm_up=0.5)
    print(outcome(soaked.results), *soaked.growths, sep="\n")
    assert soaked.faults == []
    assert all(result.requests > SECONDS for result in soaked.results)


@pytest.mark.parametrize("leak", ["rss_mb", "files", "shared_mb"])
def test_a_leak_is_seen_in_noise(leak: str) -> None:
    times = [float(second) for second in range(100)]
    held = []
    for second in range(100):
        noise = (second * 7919) % 11 - 5
        values = {"rss_mb": 500 + noise / 2, "files": 300 + noise % 2, "shared_mb": 16.0}
        values[leak] *= 1 + 0.0008 * second
        held.append(Footprint((1,), values["rss_mb"], int(values["files"]), values["shared_mb"]))
    grown = {growth.what: growth.grew > growth.allowed for growth in growths(times, held, 0.02)}
    names = {"rss_mb": "resident memory", "files": "descriptors", "shared_mb": "shared memory"}
    assert grown == {what: what == names[leak] for what in names.values()}
