"""The serving benchmark: gateway and Triton against the same ONNX file in FastAPI, LitServe, BentoML, Ray and MLServer.

Every server is up all the time, and one compiled load generator calls them in turn in a closed loop. Requests/s and
latencies are medians over the rounds; ratios are of the same round. CPU per request counts only a server's own
processes, so it is meaningful on a busy machine too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import ContenderFailed
from benchmarks.machine import machine
from benchmarks.race import MIN_REPETITIONS, Role
from benchmarks.report import Report
from benchmarks.serving.asking import Server
from benchmarks.serving.load.generator import build_generator, run_generator
from benchmarks.serving.servers import (
    BEHIND,
    BEST_PEER,
    BINARY,
    JSON,
    PASSED_ON,
    PEERS_PYTHON,
    QUEUE_DELAY_US,
    TRITON,
    check,
    peer_versions,
    running,
)
from serin.machine.hardware import core_count
from serin.serving.tuning.load_connections import Target

WARM_UP_S = 0.1
ADDED = ("serin", TRITON)  # the gateway's cost is their difference
TUNED = ("serin", "serin, waits")  # `serin tune` chooses between these by measuring


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    clients: int

    def __str__(self) -> str:
        return f"{self.rows} row{'s' if self.rows > 1 else ''} in a request, {self.clients} clients"


@dataclass(frozen=True, slots=True)
class Lap:
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # of the server, per request
    proxy_us: float = 0.0  # of the Envoy in front of it, per request


@dataclass(slots=True)
class Laps:
    role: Role
    laps: list[Lap] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(getattr(lap, figure) for lap in self.laps)


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    if not PEERS_PYTHON.exists():
        raise ContenderFailed("the peers are not installed; run `make bench-setup`")
    repetitions = 15 if full else MIN_REPETITIONS
    lap_s = 2.0 if full else 0.4
    cases = [Case(1, 1), Case(1, 8), Case(1, 32)] + ([Case(64, 1), Case(64, 8), Case(64, 32)] if full else [])
    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        running(Path(scratch), cores=core_count(), every_peer=full, say=say) as (servers, graph, notes),
    ):
        check(servers, graph)
        generator = build_generator(Path(scratch))
        alone = {name: servers[name] for name in ADDED}
        found = {}
        for case in cases:
            called = servers if full or case.clients > 1 else alone
            found[case] = _race(generator, called, case, repetitions, lap_s)
            say(f"{case}: {repetitions} rounds")
        versions = peer_versions([server.package for server in servers.values()])
    return Report(
        benchmark="serving",
        mode="full" if full else "quick",
        environment={**machine(), "versions": versions},
        cases={},
        tables=[text for case, laps in found.items() for text in (f"serving, {case}", *_table(laps), "")],
        figures={str(case): _figures(laps) for case, laps in found.items()},
        line=last_line(found),
        notes=[
            f"`serin, waits`: with a queue delay of {QUEUE_DELAY_US} us (serving.queue_delay, 0 by default)",
            "unless the name says otherwise, serin and Triton get binary tensors and the peers JSON",
            f"`{BEST_PEER}{BINARY}`: plain bytes, cheaper to read in Python than the protocol's binary tensors",
            f"`{BEHIND.strip(', ')}`: behind an Envoy that only forwards requests, with as many threads as ours",
            "every server is up all the time; the cost of idle ones (above all Ray's processes) affects all",
            "one load generator in C++ calls all of them, over HTTP and gRPC, with one connection per client",
            *notes,
        ],
    )


def last_line(found: Mapping[Case, Mapping[str, Laps]]) -> dict[str, float]:
    """Returns our requests/s over a peer's with one row per request, the worst over 8 and 32 clients.

    Every comparison is of the same form of request; a key without `_json` or `_binary` is the worse of the two.

    `peer_behind_envoy`: the best Python server and ours, both behind an Envoy. `peer_alone`: both without one.
    `best_peer`: ours with its gateway, tuned, over the best server without one in either form, at 32 clients.
    """
    cases = {case.clients: laps for case, laps in found.items() if case.rows == 1 and case.clients > 1}
    judged = list(cases.values())
    added = next(laps for case, laps in found.items() if case.clients == 1 and case.rows == 1)
    differences = [
        ours.p50_ms - bare.p50_ms for ours, bare in zip(*(added[name].laps for name in ADDED), strict=True)
    ]
    most = cases[max(cases)]
    line = {
        "best_peer": max(_against_best(most, name, _alone(most)) for name in TUNED),
        "peer_behind_envoy_json": _least(judged, f"serin{JSON}", f"{BEST_PEER}{BEHIND}"),
        "peer_behind_envoy_binary": _least(judged, "serin", f"{BEST_PEER}{BINARY}{BEHIND}"),
        "peer_alone_json": min(
            _against_best(laps, f"{TRITON}{JSON}", _alone(laps, binary=False)) for laps in judged
        ),
        "peer_alone_binary": min(_against_best(laps, TRITON, _alone(laps, binary=True)) for laps in judged),
        "gateway_ms": statistics.median(differences),
        "over_bare_envoy": max(_ratio(laps["serin"], laps[PASSED_ON], "proxy_us") for laps in judged),
        "grpc": _least(judged, "serin, gRPC", "serin"),
    }
    for key in ("peer_behind_envoy", "peer_alone"):
        line[key] = min(line[f"{key}_json"], line[f"{key}_binary"])
    return line


def _alone(laps: Mapping[str, Laps], *, binary: bool | None = None) -> list[str]:
    """Returns the peers without an Envoy that are called in this form."""
    names = [name for name, found in laps.items() if found.role == "peer" and not name.endswith(BEHIND)]
    return [name for name in names if binary is None or name.endswith(BINARY) is binary]


def _least(judged: Sequence[Mapping[str, Laps]], one: str, other: str) -> float:
    return min(_ratio(laps[one], laps[other]) for laps in judged)


def _against_best(laps: Mapping[str, Laps], name: str, peers: Sequence[str]) -> float:
    return min(_ratio(laps[name], laps[peer]) for peer in peers)


def _ratio(one: Laps, other: Laps, figure: str = "requests_per_s") -> float:
    """Returns the median over rounds of the ratio, so that drift of the machine cancels."""
    pairs = zip(one.laps, other.laps, strict=True)
    return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)


def _race(
    generator: Path, servers: Mapping[str, Server], case: Case, repetitions: int, lap_s: float
) -> dict[str, Laps]:
    """Runs each server once per round in rotating order; the first round is a warm-up and not counted."""
    found = {name: Laps(server.role) for name, server in servers.items()}
    targets = {name: server.target(case.rows) for name, server in servers.items()}
    names = list(servers)
    for turn in range(repetitions + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            lap = _lap(generator, name, servers[name], targets[name], case.clients, lap_s)
            if turn:
                found[name].laps.append(lap)
    return found


def _lap(generator: Path, name: str, server: Server, target: Target, clients: int, lap_s: float) -> Lap:
    """Runs one lap, and a longer one if nothing was answered: on a busy machine servers are slow, not broken."""
    for longer in (1, 8):
        busy_s, proxy_s = server.cpu_s(), server.proxy_s()
        result = run_generator(
            generator, target, clients=clients, seconds=longer * lap_s, warm_up_s=WARM_UP_S
        )
        if result.good or result.failed:
            break
    if result.failed or not result.good:
        raise ContenderFailed(
            f"{name} failed {result.failed} of {result.good + result.failed} requests {result.why}"
        )
    return Lap(
        result.requests_per_s,
        result.p50_ms,
        result.p99_ms,
        (server.cpu_s() - busy_s) / result.all_requests * 1e6,
        (server.proxy_s() - proxy_s) / result.all_requests * 1e6,
    )


def _table(found: Mapping[str, Laps]) -> list[str]:
    ours = found["serin"]
    rows = [
        f"  {name:<24}{laps.role:<7}{laps.median('requests_per_s'):>10,.0f}/s{laps.median('p50_ms'):>10.2f} ms"
        f"{laps.median('p99_ms'):>10.2f} ms{_ratio(laps, ours):>9.2f}{laps.median('cpu_us'):>11.0f} us"
        for name, laps in sorted(found.items(), key=lambda item: -item[1].median("requests_per_s"))
    ]
    head = f"  {'':<24}{'role':<7}{'requests':>12}{'p50':>13}{'p99':>13}{'/ ours':>9}{'CPU/request':>14}"
    return [head, *rows]


def _figures(found: Mapping[str, Laps]) -> dict[str, Any]:
    fields = Lap.__dataclass_fields__
    return {
        name: {"role": laps.role, **{key: [getattr(lap, key) for lap in laps.laps] for key in fields}}
        for name, laps in found.items()
    }
