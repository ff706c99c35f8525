"""Curves of serving by clients: CPU per request of gateway and Triton, and how long a request takes."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.child import ContenderFailed
from benchmarks.scale.curves import Curve
from benchmarks.serving.single import Loaded, one_release, rows_target
from serin.serving.children import Children

CLIENTS = (1, 4, 16, 64, 256)
QUICK_ROUNDS, FULL_ROUNDS = 4, 15
QUICK_LAP_S, FULL_LAP_S = 0.8, 3.0


def measure_clients(*, full: bool, say: Callable[[str], None]) -> tuple[list[Curve], list[str]]:
    """Returns the curves, and a note on requests/s. Numbers of clients take turns."""
    laps: dict[int, list[tuple[float, float, float]]] = {clients: [] for clients in CLIENTS}
    lap_s = FULL_LAP_S if full else QUICK_LAP_S
    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        Children() as host,
        one_release(Path(scratch), host) as (address, pids),
    ):
        target = rows_target(address)
        for turn in range(1 + (FULL_ROUNDS if full else QUICK_ROUNDS)):
            for clients in CLIENTS:
                lap = Loaded(target=target, pids=pids, clients=clients, lap_s=lap_s).run({})
                if lap.answer["errors"] or not lap.answer["requests"]:
                    raise ContenderFailed(f"{clients} clients: {lap.answer}")
                if turn:  # the first round warms up
                    laps[clients].append((lap.cpu_s * 1e6, lap.answer["p50_ms"], 1 / lap.seconds))
        say(f"clients: {', '.join(map(str, CLIENTS))}")
    cpu, p50, per_s = (
        {clients: statistics.median(lap[index] for lap in found) for clients, found in laps.items()}
        for index in range(3)
    )
    what = "through the gateway, one row in a request, by clients"
    curves = [
        Curve(name="clients", what=f"CPU {what}", unit="us per request", expected=0.0, points=cpu),
        Curve(name="clients_p50", what=f"p50 {what}", unit="ms", expected=1.0, points=p50),
    ]
    rates = ", ".join(f"{rate:,.0f} from {clients}" for clients, rate in per_s.items())
    return curves, [f"requests/s by clients, load generator on the same cores: {rates}"]
