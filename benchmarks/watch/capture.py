"""What recording every request costs: releases that record and releases that do not, in turns, behind one gateway.

The recorder runs all the time, as in a stack. Its CPU time per request is a figure by itself, since it works some
seconds after the requests and so during the laps of any release.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import ContenderFailed
from benchmarks.serving import model
from benchmarks.serving.servers import START_S, cpu_seconds
from serin.formats.serving.spool import spool_root
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.monitoring.capture.counters import read_captures
from serin.serving.children import Children
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.serving.tuning.load import Closed, Open, model_target, run_load
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store

BACKENDS = ("onnx_native", "onnx_python")
REQUESTS_PER_S = 1000.0
WATCHER = "watcher"
WARM_UP_S, CLIENTS = 0.2, 16
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    requests_per_s: float  # in a closed loop
    p50_ms: float  # at REQUESTS_PER_S, where the server keeps up
    p99_ms: float
    cpu_us: float  # of Triton and the gateway, per request


@dataclass(slots=True)
class Pair:
    """Laps of the same round: without and with recording."""

    without: list[Lap] = field(default_factory=list)
    recorded: list[Lap] = field(default_factory=list)

    def ratio(self, figure: str) -> float:
        pairs = zip(self.recorded, self.without, strict=True)
        return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)

    def difference(self, figure: str) -> float:
        pairs = zip(self.recorded, self.without, strict=True)
        return statistics.median(getattr(a, figure) - getattr(b, figure) for a, b in pairs)


@dataclass(slots=True)
class Costs:
    pairs: dict[str, Pair]
    recorder_us: float  # CPU of the recorder, per recorded request
    requests: int
    dropped: int


def measure_capture(*, rounds: int, lap_s: float, say: Callable[[str], None]) -> Costs:
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch, _running(Path(scratch), say) as stack:
        pairs = {backend: Pair() for backend in BACKENDS}
        before_s = stack.watcher_s()
        for turn in range(rounds + 1):
            for backend in BACKENDS:
                shares = (0, 1) if turn % 2 else (1, 0)
                laps = {share: stack.lap(backend, share, lap_s) for share in shares}
                if turn:
                    pairs[backend].without.append(laps[0])
                    pairs[backend].recorded.append(laps[1])
            say(f"capture: round {turn} of {rounds}")
        requests, dropped = stack.drained()
        spent_s = stack.watcher_s() - before_s
    return Costs(pairs, spent_s / max(requests, 1) * 1e6, requests, dropped)


@dataclass(slots=True)
class _Stack:
    home: Path
    url: str
    host: Children
    releases: dict[tuple[str, int], Release]
    asked: int = 0

    def lap(self, backend: str, share: int, lap_s: float) -> Lap:
        release = self.releases[backend, share]
        rows = model.rows(64)
        target = model_target(self.url, model.NAME, rows, model.SCHEMA, version=release.version)
        spent = cpu_seconds(self.host, release.name, PROCESS_NAME)
        before_s = spent()
        paced = run_load(target, Open(requests_per_s=REQUESTS_PER_S), seconds=lap_s, warm_up_s=WARM_UP_S)
        closed = run_load(target, Closed(clients=CLIENTS), seconds=lap_s, warm_up_s=WARM_UP_S)
        used_s = spent() - before_s
        for result in (paced, closed):
            if result.failed or not result.requests:
                raise ContenderFailed(f"{release.name} failed {result.failed} requests: {result.errors}")
        asked = round((paced.requests_per_s + closed.requests_per_s) * (lap_s + WARM_UP_S))
        return Lap(
            requests_per_s=closed.requests_per_s,
            p50_ms=paced.quantile_ms(0.5),
            p99_ms=paced.quantile_ms(0.99),
            cpu_us=used_s / asked * 1e6,
        )

    def watcher_s(self) -> float:
        return cpu_seconds(self.host, WATCHER)()

    def drained(self) -> tuple[int, int]:
        """Waits until the recorder has taken every file; returns how many requests it has recorded, and lost."""
        end = time.monotonic() + _DRAIN_S
        while any(spool_root(self.home).glob("*/*/*")):
            if time.monotonic() > end:
                raise ContenderFailed(f"the recorder has not taken all files within {_DRAIN_S:g} s")
            time.sleep(0.1)
        found = read_captures(self.home, model.NAME)
        if found is None:
            raise ContenderFailed("nothing was recorded")
        return found.requests, found.dropped


@contextmanager
def _running(home: Path, say: Callable[[str], None]) -> Iterator[_Stack]:
    store = Store(str(home / "store"))
    with Children() as host:
        fleet = Releases(
            home / "releases", host=host, store=store, devices=lambda: (), spool=spool_root(home)
        )
        releases: dict[tuple[str, int], Release] = {}
        try:
            for backend in BACKENDS:
                for share in (0, 1):
                    more = {"serving": {"backend": backend}, "monitoring": {"capture": {"share": share}}}
                    bundle = model.publish(store, queue_delay_us=0, more=more)
                    releases[backend, share] = Release(model=bundle.model, version=bundle.version)
                    fleet.start(releases[backend, share])
            say("starting four Tritons, the gateway and the recorder")
            for each in releases.values():
                host.wait_for(each.name, lambda each=each: fleet.state(each) == "ready", within_s=START_S)  # type: ignore[misc]
            port = _start_gateway(home, host, fleet, list(releases.values()))
            host.start(_watcher(home))
            yield _Stack(home, f"127.0.0.1:{port}", host, releases)
        finally:
            host.stop(WATCHER)
            host.stop(PROCESS_NAME)
            for each in releases.values():
                host.kill(each.name)
                fleet.stop(each)


def _start_gateway(home: Path, host: Children, fleet: Releases, releases: list[Release]) -> int:
    gateway = Gateway(home / "gateway", admin=home / "a.sock", log=home / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, request_filter=find_request_filter())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    endpoints = {each.name: fleet.endpoint(each) for each in releases}
    gateway.apply([ModelRoute(model=model.NAME, epoch=1, stable=releases[0])], endpoints)
    return port


def _watcher(home: Path) -> Process:
    return Process(
        name=WATCHER,
        command=(sys.executable, "-m", "serin.watcher.watcher"),
        environment={**os.environ, "SERIN_HOME": str(home), "SERIN_STORE": str(home / "store")},
        folder=Path.cwd(),
        log=home / "watcher.log",
        stop_s=20.0,
    )


def table(costs: Costs) -> list[str]:
    head = f"  {'':<26}{'requests':>12}{'p50':>12}{'p99':>12}{'CPU/request':>14}"
    lines = ["watch, every request recorded (p50, p99 at 1,000 requests/s)", head]
    for backend, pair in costs.pairs.items():
        for name, laps in ((f"{backend}", pair.without), (f"{backend}, recorded", pair.recorded)):
            speed, p50, p99, cpu = (
                statistics.median(getattr(lap, figure) for lap in laps)
                for figure in ("requests_per_s", "p50_ms", "p99_ms", "cpu_us")
            )
            lines.append(f"  {name:<26}{speed:>10,.0f}/s{p50:>9.2f} ms{p99:>9.2f} ms{cpu:>11.0f} us")
    lines.append(
        f"  the recorder: {costs.recorder_us:.0f} us of CPU per request; {costs.requests:,} requests recorded, "
        f"{costs.dropped:,} dropped"
    )
    return [*lines, ""]


def figures(costs: Costs) -> dict[str, Any]:
    return {
        backend: {
            "without": [asdict(lap) for lap in pair.without],
            "recorded": [asdict(lap) for lap in pair.recorded],
        }
        for backend, pair in costs.pairs.items()
    }


def last_line(costs: Costs) -> dict[str, float]:
    chosen = costs.pairs["onnx_native"]
    line = {
        "capture_cost": 1.0 - chosen.ratio("requests_per_s"),
        "capture_p99_ms": chosen.difference("p99_ms"),
    }
    for backend, pair in costs.pairs.items():
        line[f"{backend}_throughput"] = pair.ratio("requests_per_s")
        line[f"{backend}_p99_added_ms"] = pair.difference("p99_ms")
        line[f"{backend}_cpu"] = pair.ratio("cpu_us")
    return {**line, "recorder_us": costs.recorder_us, "dropped": float(costs.dropped)}
