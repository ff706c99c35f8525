"""What recording every request costs: a release that is recorded and one that is not, in turns, behind one gateway,
with binary and JSON bodies of one row and of 64.

The recorder runs all the time, as in a stack. Its CPU time per request is a figure by itself, since it works some
seconds after the requests and so during the laps of any release. At the end, the largest JSON bodies come as fast as
they are answered, to see whether it keeps up.
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

import psutil

from benchmarks.child import ContenderFailed
from benchmarks.serving import model
from benchmarks.serving.servers import START_S, cpu_seconds
from serin.cluster.version_settings import model_timeouts, stored_timeouts
from serin.formats.serving.ring import Ring, ring_files
from serin.machine.in_memory import remove_sockets, socket_folder
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.monitoring.capture.counters import read_captures
from serin.serving.children import Children
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.serving.tuning.load import Closed, Open, run_load
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store
from tests.kit.load import json_target, model_target

FORMS = {"binary": ("binary", 1), "json": ("json", 1), "binary_64": ("binary", 64), "json_64": ("json", 64)}
REQUESTS_PER_S = {1: 1000.0, 64: 200.0}  # by rows: so many that the server keeps up on two cores
WATCHER = "watcher"
WARM_UP_S, CLIENTS = 0.2, 16
_DRAIN_S = 30.0
_LOOK_S = 0.5


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


@dataclass(slots=True, kw_only=True)
class Rush:
    """JSON bodies of 64 rows as fast as they are answered. `fill`: the largest share of a ring that waited.
    `memory_mb`: what the recorder's process took at most."""

    seconds: float
    requests: int
    dropped: int
    fill: float
    memory_mb: float


@dataclass(slots=True)
class Costs:
    pairs: dict[str, Pair]
    recorder_us: float  # CPU of the recorder, per recorded request
    requests: int
    dropped: int
    rush: Rush


def measure_capture(*, rounds: int, lap_s: float, rush_s: float, say: Callable[[str], None]) -> Costs:
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch, _running(Path(scratch), say) as stack:
        pairs = {form: Pair() for form in FORMS}
        before_s = stack.watcher_s()
        for turn in range(rounds + 1):
            for form in FORMS:
                shares = (0, 1) if turn % 2 else (1, 0)
                laps = {share: stack.lap(form, share, lap_s) for share in shares}
                if turn:
                    pairs[form].without.append(laps[0])
                    pairs[form].recorded.append(laps[1])
            say(f"capture: round {turn} of {rounds}")
        requests, dropped = stack.drained()
        spent_s = stack.watcher_s() - before_s
        say(f"capture: {rush_s:g} s of JSON with 64 rows")
        rush = stack.rush(rush_s)
    return Costs(pairs, spent_s / max(requests, 1) * 1e6, requests, dropped, rush)


@dataclass(slots=True)
class _Stack:
    home: Path
    url: str
    host: Children
    releases: dict[int, Release]  # by share
    asked: int = 0

    def target(self, form: str, share: int) -> Any:
        kind, count = FORMS[form]
        version, columns = self.releases[share].version, model.rows(64 * count)
        if kind == "binary":
            return model_target(
                self.url, model.NAME, columns, model.SCHEMA, version=version, rows_per_request=count
            )
        bodies = [
            {
                "inputs": [
                    {
                        "name": each.name,
                        "datatype": each.dtype,
                        "shape": [count, 1],
                        "data": columns[each.name][start : start + count].ravel().tolist(),
                    }
                    for each in model.SCHEMA.inputs
                ]
            }
            for start in range(0, 64 * count, count)
        ]
        return json_target(self.url, f"/v2/models/{model.NAME}/versions/{version}/infer", bodies)

    def lap(self, form: str, share: int, lap_s: float) -> Lap:
        release, target = self.releases[share], self.target(form, share)
        spent = cpu_seconds(self.host, release.name, PROCESS_NAME)
        before_s = spent()
        rate = REQUESTS_PER_S[FORMS[form][1]]
        paced = run_load(target, Open(requests_per_s=rate), seconds=lap_s, warm_up_s=WARM_UP_S)
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

    def rush(self, seconds: float) -> Rush:
        recorded, dropped = self.drained()
        target, fill, memory = self.target("json_64", 1), 0.0, 0.0
        watcher = psutil.Process(self.host.pid(WATCHER))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = run_load(target, Closed(clients=CLIENTS), seconds=_LOOK_S * 4, warm_up_s=0.0)
            if result.failed:
                raise ContenderFailed(f"{result.failed} requests failed: {result.errors}")
            fill = max(fill, *(ring_fill(path) for path in ring_files(self.home)))
            memory = max(memory, watcher.memory_info().rss / 1e6)
        after, lost = self.drained()
        return Rush(
            seconds=seconds, requests=after - recorded, dropped=lost - dropped, fill=fill, memory_mb=memory
        )

    def watcher_s(self) -> float:
        return cpu_seconds(self.host, WATCHER)()

    def drained(self) -> tuple[int, int]:
        """Waits until the recorder has taken every entry; returns how many requests it has recorded, and lost."""
        end = time.monotonic() + _DRAIN_S
        while any(ring_fill(path) for path in ring_files(self.home)):
            if time.monotonic() > end:
                raise ContenderFailed(f"the recorder has not taken all entries within {_DRAIN_S:g} s")
            time.sleep(0.1)
        found = read_captures(self.home, model.NAME)
        if found is None:
            raise ContenderFailed("nothing was recorded")
        return found.requests, found.dropped


def ring_fill(path: Path) -> float:
    ring = Ring(path)
    fill = ring.fill
    ring.close()
    return fill


@contextmanager
def _running(home: Path, say: Callable[[str], None]) -> Iterator[_Stack]:
    store = Store(str(home / "store"))
    with Children() as host:
        fleet = Releases(home / "releases", host=host, store=store, devices=lambda: ())
        releases: dict[int, Release] = {}
        try:
            for share in (0, 1):
                more = {"serving": {"backend": "onnx_native"}, "monitoring": {"capture": {"share": share}}}
                bundle = model.publish(store, queue_delay_us=0, more=more)
                releases[share] = Release(model=bundle.model, version=bundle.version)
                fleet.start(releases[share])
            say("starting two Tritons, the gateway and the recorder")
            for each in releases.values():
                host.wait_for(each.name, lambda each=each: fleet.state(each) == "ready", within_s=START_S)  # type: ignore[misc]
            port = _start_gateway(home, host, fleet, store, list(releases.values()))
            host.start(_watcher(home))
            yield _Stack(home, f"127.0.0.1:{port}", host, releases)
        finally:
            host.stop(PROCESS_NAME)
            host.stop(WATCHER)
            for each in releases.values():
                host.kill(each.name)
                fleet.stop(each)
            for path in ring_files(home):
                path.unlink()
            remove_sockets(home)


def _start_gateway(home: Path, host: Children, fleet: Releases, store: Store, releases: list[Release]) -> int:
    admin = socket_folder(home) / "admin.sock"
    gateway = Gateway(home / "gateway", admin=admin, log=home / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, request_filter=find_request_filter())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    endpoints = {each.name: fleet.endpoint(each) for each in releases}
    limits = model_timeouts(stored_timeouts(store), releases)
    gateway.apply(
        [ModelRoute(model=model.NAME, epoch=1, stable=releases[0])], endpoints, {model.NAME: limits}
    )
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
    rates = ", ".join(f"{rate:,.0f} requests/s of {rows} rows" for rows, rate in REQUESTS_PER_S.items())
    lines = [f"watch, every request recorded (p50, p99 at {rates})", head]
    for form, pair in costs.pairs.items():
        for name, laps in ((form, pair.without), (f"{form}, recorded", pair.recorded)):
            speed, p50, p99, cpu = (
                statistics.median(getattr(lap, figure) for lap in laps)
                for figure in ("requests_per_s", "p50_ms", "p99_ms", "cpu_us")
            )
            lines.append(f"  {name:<26}{speed:>10,.0f}/s{p50:>9.2f} ms{p99:>9.2f} ms{cpu:>11.0f} us")
    rush = costs.rush
    lines.append(
        f"  the recorder: {costs.recorder_us:.0f} us of CPU per request; {costs.requests:,} requests recorded, "
        f"{costs.dropped:,} dropped"
    )
    lines.append(
        f"  {rush.seconds:g} s of JSON with 64 rows: {rush.requests:,} requests recorded, {rush.dropped:,} dropped; "
        f"a ring was {rush.fill:.0%} full at most, the recorder took {rush.memory_mb:.0f} MB"
    )
    return [*lines, ""]


def figures(costs: Costs) -> dict[str, Any]:
    pairs = {
        form: {
            "without": [asdict(lap) for lap in pair.without],
            "recorded": [asdict(lap) for lap in pair.recorded],
        }
        for form, pair in costs.pairs.items()
    }
    return {**pairs, "rush": asdict(costs.rush)}


def last_line(costs: Costs) -> dict[str, float]:
    """The largest cost of all forms, and each form's own."""
    pairs = costs.pairs
    line = {
        "capture_cost": max(1.0 - pair.ratio("requests_per_s") for pair in pairs.values()),
        "capture_p99_ms": max(pair.difference("p99_ms") for pair in pairs.values()),
    }
    for form, pair in pairs.items():
        line[f"{form}_throughput"] = pair.ratio("requests_per_s")
        line[f"{form}_p99_added_ms"] = pair.difference("p99_ms")
        line[f"{form}_cpu"] = pair.ratio("cpu_us")
    rush = {"rush_dropped": float(costs.rush.dropped), "rush_fill": costs.rush.fill}
    return {**line, **rush, "recorder_us": costs.recorder_us, "dropped": float(costs.dropped)}
