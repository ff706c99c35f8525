"""The duty that adds up what serving costs: CPU and memory of each release, its GPUs, energy, and predictions."""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from serin.errors import NameInvalid, SupervisorGone
from serin.formats.serving.serving_cost import (
    Counters,
    ServingCost,
    read_serving_cost,
    write_serving_cost,
)
from serin.host.gpu_use import GpuUse, read_gpu_use
from serin.host.supervisor import Supervisor
from serin.machine import environment
from serin.machine.hardware import Device, Nvml, core_count
from serin.machine.process import ProcessHost
from serin.machine.usage import process_tree
from serin.monitoring.history.read import requests_of
from serin.serving.triton.release_record import Served, read_checked, read_record
from serin.store.artifacts import Release
from serin.watcher.duty import Duty

_TIMEOUT_S: Final = 2.0
_COUNTER: Final = re.compile(r"^(nv_inference_\w+)\{([^}]*)\} ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a running release. `busy_share`: of its GPUs; None where somebody else uses them, too."""

    counters: Counters
    memory_bytes: int
    served: Served
    devices: Sequence[Device] = ()
    gpu_bytes: int | None = None
    busy_share: float | None = None


class CostDuty(Duty):
    name, every_s = "costs", 10.0

    def __init__(self, home: Path, host: ProcessHost | None = None, driver: Nvml | None = None) -> None:
        """`driver`: NVML, unless GPUs are pretended."""
        self._home, self._host = home, host or Supervisor(home)
        self._driver = driver or (None if environment.path("SERIN_INVENTORY") else Nvml.open())

    def tick(self, now: float) -> None:
        uses = {use.device.id: use for use in read_gpu_use(self._home, self._host)}
        for folder in sorted(path.parent for path in (self._home / "releases").glob("*/release.json")):
            with contextlib.suppress(NameInvalid, SupervisorGone, OSError, psutil.Error):
                release = Release.parse(folder.name)
                look = self._look(release, folder, uses, now)
                if look is not None:
                    self._add(release, look)

    def _look(self, release: Release, folder: Path, uses: dict[str, GpuUse], now: float) -> Look | None:
        record, pid = read_record(folder), self._host.pid(release.name)
        if record is None or pid is None:
            return None
        tree = [psutil.Process(each) for each in process_tree(pid)]
        times = [process.cpu_times() for process in tree]
        rows, requests = read_triton_counts(record.place.metrics_port, release)
        checked = read_checked(folder, pid)
        own = [uses[device] for device in record.served.devices if device in uses]
        alone = own if all(_only(use, release) for use in own) else []
        return Look(
            counters=Counters(
                at=now,
                process=(pid, tree[0].create_time()),
                cpu_s=sum(each.user + each.system for each in times),
                rows=max(0, rows - checked.rows),
                requests=max(0, requests - checked.requests),
                asked=requests_of(self._home, release.model, release.name, tree[0].create_time() - 60),
                joules=self._joules(alone),
            ),
            memory_bytes=sum(process.memory_info().rss for process in tree),
            served=record.served,
            devices=[use.device for use in own],
            gpu_bytes=_gpu_bytes(own, release),
            busy_share=self._busy(alone),
        )

    def _joules(self, uses: Sequence[GpuUse]) -> float | None:
        found = [self._driver.joules(use.device.id) for use in uses] if self._driver else []
        known = [value for value in found if value is not None]
        return sum(known) if known and len(known) == len(uses) else None

    def _busy(self, uses: Sequence[GpuUse]) -> float | None:
        found = [self._driver.busy_share(use.device.id) for use in uses] if self._driver else []
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None

    def _add(self, release: Release, look: Look) -> None:
        known = read_serving_cost(self._home, release.name)
        cost = known or ServingCost(release=release.name, since=look.counters.process[1])
        write_serving_cost(self._home, add_look(cost, look, price=environment.price_per_hour()))


def add_look(cost: ServingCost, look: Look, *, price: float | None) -> ServingCost:
    """The costs with what was added since the last look. Pure. `price`: of a GPU, or of the machine without, per
    hour."""
    now, last = look.counters, cost.last
    fresh = last is None or last.process != now.process
    base = Counters(at=now.process[1], process=now.process) if last is None or fresh else last
    seconds, cpu_s = max(0.0, now.at - base.at), max(0.0, now.cpu_s - base.cpu_s)
    new = max(0, now.predictions - base.predictions)
    shares = [look.served.bytes / device.memory_bytes for device in look.devices if device.memory_bytes]
    gpu_s = seconds * sum(shares)
    money = None if price is None else price / 3600 * (gpu_s if look.devices else cpu_s / core_count())
    joules = None if now.joules is None or base.joules is None else now.joules - base.joules
    busy = look.busy_share
    total = (cost.busy_share or 0.0) * cost.busy_looks + (busy or 0.0)
    looks = cost.busy_looks + (busy is not None)
    return replace(
        cost,
        seconds=cost.seconds + seconds,
        predictions=cost.predictions + new,
        requests=cost.requests + max(0, now.asked - base.asked),
        cpu_s=cost.cpu_s + cpu_s,
        peak_memory_bytes=max(cost.peak_memory_bytes, look.memory_bytes),
        gpu_s=cost.gpu_s + gpu_s,
        gpu_peak_bytes=max(cost.gpu_peak_bytes or 0, look.gpu_bytes or 0) or None,
        busy_share=total / looks if looks else None,
        busy_looks=looks,
        joules=cost.joules if joules is None else (cost.joules or 0.0) + joules,
        joules_predictions=cost.joules_predictions + (0 if joules is None else new),
        cost=cost.cost if money is None else (cost.cost or 0.0) + money,
        last=now,
    )


def read_triton_counts(port: int, release: Release) -> tuple[int, int]:
    """Rows and successful requests of the release's model since its process began, by Triton's own counters."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"Triton's metrics cannot be read: {error}") from error
    finally:
        connection.close()
    return parse_counts(text, release)


def parse_counts(text: str, release: Release) -> tuple[int, int]:
    counts = {
        name: float(value)
        for name, labels, value in _COUNTER.findall(text)
        if f'model="{release.model}"' in labels and f'version="{release.version}"' in labels
    }
    return int(counts.get("nv_inference_count", 0)), int(counts.get("nv_inference_request_success", 0))


def _only(use: GpuUse, release: Release) -> bool:
    return not use.holders and [each.release for each in use.releases] == [release.name]


def _gpu_bytes(uses: Sequence[GpuUse], release: Release) -> int | None:
    found = [
        each.used_bytes
        for use in uses
        for each in use.releases
        if each.release == release.name and each.used_bytes
    ]
    return sum(found) if found else None
