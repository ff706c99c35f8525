"""Three hosts as a controller sees them: `python -m benchmarks.scale.hosts_reports STORE`. They only write objects.

Their releases are ready at once, and their gateways have equal requests of both arms of every rollout, which they cut
into evidence as an agent does.
"""

from __future__ import annotations

import sys
import time

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.serving.request import Request
from serin.store.open import open_objects
from tests.fakes.agents import FakeAgent

HOSTS = ("a", "b", "c")
EVERY_S = 0.25
REQUESTS_PER_S = 20  # of each model with a rollout, at each gateway


def requests(host: str, state: DesiredState, since: float, until: float) -> list[Request]:
    """Equal latencies on both sides, evenly over the time."""
    found = []
    for model, arm in state.arms.items():
        count = max(2, round(REQUESTS_PER_S * min(until - since, 1.0)))
        epoch = max(arm.shares)
        for number in range(count):
            t = since + (until - since) * number / count if since else until
            role, release = ("candidate", arm.candidate) if number % 2 else ("stable", arm.stable)
            us = 900.0 + 13.0 * (number % 17)
            name = f"{host}-{until:.3f}-{number}"
            found.append(Request(t, model, epoch, role, release, 200, None, us, 1, "-", name))
    return sorted(found)


def main(store: str) -> None:
    objects = open_objects(store)
    agents = [FakeAgent(objects, host, requests=requests) for host in HOSTS]
    while True:
        began = time.monotonic()
        for agent in agents:
            agent.step(time.time())
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))


if __name__ == "__main__":
    main(sys.argv[1])
