"""One release behind its gateway, as a stack runs them, and what a request costs it in CPU time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race import Lap
from benchmarks.serving import model
from serin.machine.ports import free_ports
from serin.serving.children import Children
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.serving.tuning.load import Closed, model_target, run_load
from serin.serving.tuning.load_connections import Target
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store

START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A server under load for the time of a lap. Seconds and CPU seconds of a lap are those of one request."""

    target: Target
    pids: tuple[int, ...]
    clients: int
    lap_s: float

    def run(self, request: Mapping[str, Any]) -> Lap:
        del request
        before = sum(map(thread_s, self.pids))
        found = run_load(self.target, Closed(clients=self.clients), seconds=self.lap_s, warm_up_s=0.0)
        spent, count = sum(map(thread_s, self.pids)) - before, max(1, len(found.latencies))
        answer = {
            "requests": len(found.latencies),
            "errors": {kind: number for kind, number in found.errors.items() if kind != "unanswered"},
            "p50_ms": found.quantile_ms(0.5),
            "p99_ms": found.quantile_ms(0.99),
        }
        return Lap(seconds=found.seconds / count, cpu_s=spent / count, peak_bytes=0, answer=answer)


def thread_s(pid: int) -> float:
    """Returns the CPU seconds of the threads that a process has now, which the kernel counts in nanoseconds."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def rows_target(url: str) -> Target:
    """Requests of one row with binary tensors."""
    return model_target(url, model.NAME, model.rows(64), model.SCHEMA)


def answers(url: str) -> bool:
    return bool(run_load(rows_target(url), Closed(clients=1), seconds=0.05).latencies)


@contextlib.contextmanager
def one_release(folder: Path, host: Children) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the gateway's address and the processes of gateway and Triton."""
    store = Store(str(folder / "store"))
    bundle = model.publish(store, queue_delay_us=0)
    release = Release(model=bundle.model, version=bundle.version)
    releases = Releases(folder / "releases", host=host, store=store)
    try:
        releases.start(release)
        address = _gateway(folder, host, releases, release)
        yield address, (host.pid(release.name), host.pid(PROCESS_NAME))  # type: ignore[misc]
    finally:
        host.kill(release.name)
        releases.stop(release)


def _gateway(folder: Path, host: Children, releases: Releases, release: Release) -> str:
    gateway = Gateway(folder / "gateway", admin=folder / "a.sock", log=folder / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, request_filter=find_request_filter())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    host.wait_for(release.name, lambda: releases.state(release) == "ready", within_s=START_S)
    endpoints = {release.name: releases.endpoint(release)}
    gateway.apply([ModelRoute(model=release.model, epoch=1, stable=release)], endpoints)
    address = f"127.0.0.1:{port}"
    host.wait_for(PROCESS_NAME, lambda: answers(address), within_s=START_S)
    return address
