"""What a stage cost: seconds, GPUs booked and busy, memory, energy, the share spent waiting for data; and advice.

Numbers that were not measured are None, never a guess: busy share and energy come from the driver (NVML) alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from serin.hardware import Device, Nvml

_SAMPLE_S = 0.25
_WAITS_FOR_DATA = 0.2  # of the time, from which on the loader is what to look at
_IDLE_BELOW = 0.3  # busy share of a GPU under which it is fed too slowly

_MOSTLY_START = 0.2  # share of work in the whole time below which nothing else matters

Bound = Literal["start", "data", "launch", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    id: str
    name: str
    booked_s: float
    busy_share: float | None
    peak_bytes: int | None
    joules: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    stage: str
    started: float  # seconds since 1970
    seconds: float
    device: tuple[DeviceCost, ...]
    rows: int | None
    rows_per_s: float | None
    data_wait_share: float | None
    bound: Bound | None  # what would have to become faster first
    advice: str

    def to_json(self) -> dict[str, Any]:
        return {"format": "serin.receipt", "version": 1, **asdict(self)}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What the block under `measure` tells about itself; `receipt` is there when the block has ended."""

    rows: int | None = None
    work_s: float | None = None  # the part of the time in which rows were worked on; the whole when not told
    data_wait_share: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by device id
    receipt: Receipt | None = None


@contextmanager
def measure(stage: str, devices: Sequence[Device] = ()) -> Iterator[Measurement]:
    """Time the block and watch its devices. A receipt is made also when the block fails: it was paid for."""
    measurement = Measurement()
    watch = _DeviceWatch(devices)
    started, clock = time.time(), time.perf_counter()
    watch.start()
    try:
        yield measurement
    finally:
        seconds = time.perf_counter() - clock
        measurement.receipt = _receipt(stage, started, seconds, watch.stop(seconds, measurement), measurement)


def _receipt(
    stage: str, started: float, seconds: float, device: tuple[DeviceCost, ...], measured: Measurement
) -> Receipt:
    work_s = measured.work_s or seconds
    # The driver is asked all the time, work is only part of it: a GPU that idles while processes start is no GPU that
    # is fed too slowly.
    busy = [min(1.0, cost.busy_share * seconds / work_s) for cost in device if cost.busy_share is not None]
    bound, advice = judge(
        data_wait_share=measured.data_wait_share,
        busy_share=min(busy) if busy else None,
        work_share=None if measured.work_s is None else measured.work_s / seconds,
    )
    return Receipt(
        stage=stage,
        started=started,
        seconds=seconds,
        device=device,
        rows=measured.rows,
        rows_per_s=None if measured.rows is None else measured.rows / work_s,
        data_wait_share=measured.data_wait_share,
        bound=bound,
        advice=advice,
    )


def judge(
    *, data_wait_share: float | None, busy_share: float | None, work_share: float | None
) -> tuple[Bound | None, str]:
    """What held the stage back, and what to do about it. None: nothing was measured that could tell.

    `work_share` is of the whole time, the other two are of the time of work.
    """
    if work_share is not None and work_share < _MOSTLY_START:
        return (
            "start",
            f"work took {work_share:.0%} of the time, the rest was start and end: a faster device gains little",
        )
    if data_wait_share is not None and data_wait_share > _WAITS_FOR_DATA:
        share = f"{data_wait_share:.0%}"
        return "data", f"{share} of the work went into waiting for rows: faster storage or more memory helps"
    if busy_share is not None and busy_share < _IDLE_BELOW:
        return (
            "launch",
            f"the GPU was busy {busy_share:.0%} of the work: raise training.batch_rows or book fewer GPUs",
        )
    if data_wait_share is None and busy_share is None:
        return None, ""
    return "compute", ""


class _DeviceWatch:
    """Samples the driver from a thread while a stage runs; does nothing where there is no driver."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._nvml = Nvml.open() if devices else None
        self._busy: dict[str, list[float]] = {device.id: [] for device in devices}
        self._joules_before: dict[str, float | None] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="device-watch", daemon=True)

    def start(self) -> None:
        if self._nvml:
            self._joules_before = {device.id: self._nvml.joules(device.id) for device in self._devices}
            self._thread.start()

    def stop(self, seconds: float, measured: Measurement) -> tuple[DeviceCost, ...]:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        return tuple(
            DeviceCost(
                id=device.id,
                name=device.name,
                booked_s=seconds,
                busy_share=_mean(self._busy[device.id]),
                peak_bytes=measured.peak_bytes.get(device.id),
                joules=self._joules_since(device.id),
            )
            for device in self._devices
        )

    def _sample(self) -> None:
        assert self._nvml is not None
        while not self._ended.wait(_SAMPLE_S):
            for device, shares in self._busy.items():
                share = self._nvml.busy_share(device)
                if share is not None:
                    shares.append(share)

    def _joules_since(self, device: str) -> float | None:
        before = self._joules_before.get(device)
        after = self._nvml.joules(device) if self._nvml else None
        return None if before is None or after is None else after - before


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
