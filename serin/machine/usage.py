"""Measures how busy devices are while a stage runs: GPUs by the driver, the CPU by the kernel's counters.

Only the run's own resources are measured: the GPUs it has leased, or the processes it has started. A value that cannot
be measured is None, never a guess.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from serin.machine.hardware import Device, Nvml, core_count

_GPU_SAMPLE_S = 0.25
_CPU_SAMPLE_S = 0.5
_CPU_NAMES = ("model name", "Model", "Hardware")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    id: str
    name: str
    booked_s: float
    busy_share: float | None
    peak_bytes: int | None
    joules: float | None


class Watch:
    """Samples the resources of a run from a thread."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s, self._ended = sample_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, name="usage-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look_at(self, pid: int) -> None:
        """Attributes that process and its children to the run from now on. A leased GPU is all the run's anyway."""

    @abstractmethod
    def stop(self, seconds: float, peak_bytes: dict[str, int]) -> tuple[DeviceCost, ...]:
        """What the run cost; `peak_bytes` by device where the run knows it itself."""

    @abstractmethod
    def _look(self) -> None: ...

    def _sample(self) -> None:
        while not self._ended.wait(self._sample_s):
            self._look()

    def _end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._look()  # work that took less than a sample is seen, too


class BusyTime:
    """The busy share of a device, from shares of periods that follow one another.

    A period begins where the one before ended, and lasts a second at most, as the driver's do: time of which nothing is
    known does not count."""

    _LONGEST_S = 1.0

    def __init__(self, began_s: float) -> None:
        self.until_s = began_s
        self._known_s = self._busy_s = 0.0

    def add(self, ended_s: float, share: float) -> None:
        seconds = min(max(0.0, ended_s - self.until_s), self._LONGEST_S)
        self._known_s += seconds
        self._busy_s += seconds * share
        self.until_s = max(self.until_s, ended_s)

    @property
    def share(self) -> float | None:
        return self._busy_s / self._known_s if self._known_s else None


class GpuWatch(Watch):
    """Samples the driver; does nothing where there is none.

    The busy share comes from the periods that the driver itself has kept: this thread may look late, because a call of
    a GPU library can hold the interpreter for seconds. A driver that keeps none is asked for its last period.

    Memory is that of this process and its children. Where the driver names no processes, as in some containers, it is
    the growth of the memory in use since the start."""

    def __init__(self, devices: Sequence[Device], driver: Nvml | None = None) -> None:
        super().__init__(_GPU_SAMPLE_S)
        self._devices = tuple(devices)
        self._nvml = driver or (Nvml.open() if devices else None)
        self._busy: dict[str, BusyTime] = {}
        self._peak: dict[str, int] = {}
        self._free_before: dict[str, int | None] = {}
        self._joules_before: dict[str, float | None] = {}

    def start(self) -> None:
        if self._nvml:
            self._joules_before = {device.id: self._nvml.joules(device.id) for device in self._devices}
            self._free_before = {device.id: self._nvml.free_bytes(device.id) for device in self._devices}
            for device in self._devices:
                kept = self._nvml.busy_samples(device.id, 0)
                self._busy[device.id] = BusyTime(kept[-1][0] / 1e6 if kept else time.time())
            super().start()

    def stop(self, seconds: float, peak_bytes: dict[str, int]) -> tuple[DeviceCost, ...]:
        self._end()
        return tuple(
            DeviceCost(
                id=device.id,
                name=device.name,
                booked_s=seconds,
                busy_share=self._busy[device.id].share if device.id in self._busy else None,
                peak_bytes=peak_bytes.get(device.id) or self._peak.get(device.id) or None,
                joules=self._joules_since(device.id),
            )
            for device in self._devices
        )

    def _look(self) -> None:
        assert self._nvml is not None
        mine = process_tree(os.getpid())
        for device, busy in self._busy.items():
            for ended_s, share in self._new_periods(device, busy.until_s):
                busy.add(ended_s, share)
            self._peak[device] = max(self._peak.get(device, 0), self._held(device, mine))

    def _new_periods(self, device: str, since_s: float) -> list[tuple[float, float]]:
        """The end and the busy share of each period since then."""
        assert self._nvml is not None
        samples = self._nvml.busy_samples(device, round(since_s * 1e6))
        if samples is not None:
            return [(ended_us / 1e6, share) for ended_us, share in samples]
        share = self._nvml.busy_share(device)
        return [] if share is None else [(time.time(), share)]

    def _held(self, device: str, mine: Sequence[int]) -> int:
        assert self._nvml is not None
        by_process = self._nvml.process_bytes(device)
        if by_process:
            return sum(by_process.get(pid, 0) for pid in mine)
        before, now = self._free_before.get(device), self._nvml.free_bytes(device)
        return 0 if before is None or now is None else max(0, before - now)

    def _joules_since(self, device: str) -> float | None:
        before = self._joules_before.get(device)
        after = self._nvml.joules(device) if self._nvml else None
        return None if before is None or after is None else after - before


class CpuWatch(Watch):
    """Samples a process and its children: seconds of all cores they took, memory they held together."""

    def __init__(self) -> None:
        super().__init__(_CPU_SAMPLE_S)
        self._root = os.getpid()
        self._before: dict[tuple[int, float], float] = {}
        self._seen: dict[tuple[int, float], float] = {}
        self._peak = 0

    def start(self) -> None:
        self._look()
        self._before = dict(self._seen)
        super().start()

    def look_at(self, pid: int) -> None:
        self._root, self._seen, self._before, self._peak = pid, {}, {}, 0

    def stop(self, seconds: float, peak_bytes: dict[str, int]) -> tuple[DeviceCost, ...]:
        self._end()
        busy = sum(seconds - self._before.get(process, 0.0) for process, seconds in self._seen.items())
        return (
            DeviceCost(
                id="cpu",
                name=f"{cpu_name()}, {core_count()} cores",
                booked_s=seconds,
                busy_share=min(1.0, busy / (seconds * core_count())) if seconds > 0 else None,
                peak_bytes=max(self._peak, peak_bytes.get("cpu", 0)) or None,
                joules=None,  # the kernel's counters are the whole machine's, and only root may read them
            ),
        )

    def _look(self) -> None:
        resident, seen = 0, self._seen  # look_at may begin a new one in the meantime
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._root)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    seen[process.pid, process.create_time()] = times.user + times.system
                    resident += process.memory_info().rss
        self._peak = max(self._peak, resident)


def process_tree(pid: int) -> list[int]:
    """A process and its children, as far as they still run."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in _CPU_NAMES and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
