"""The receipt of a stage: seconds, devices booked and busy, memory, energy, cost; the bottleneck; one line of advice.

Numbers that were not measured are None, never a guess: a GPU's busy share and energy come from the driver (NVML), the
CPU's from the kernel, and the distance to the device's best from the stage itself (`Work`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from serin.machine import environment
from serin.machine.hardware import Device
from serin.machine.packages import entered
from serin.machine.typed_json import Document
from serin.machine.usage import CpuWatch, DeviceCost, GpuWatch, Watch
from serin.store.waits import Wait, longest

_WAITS_FOR_DATA = 0.2  # of the time, from which on the loader is what to look at
_IDLE_BELOW = 0.3  # busy share of a GPU under which it is fed too slowly
_FAR_FROM_THE_ROOF = 0.3  # of what the device could do: below that it is neither its products nor its memory

_MOSTLY_START = 0.2  # share of work in the whole time below which nothing else matters

Bound = Literal["start", "data", "launch", "memory", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was computed, beside what the device does at best: matrix products and copies, measured on it."""

    flops: float
    bytes: float  # moved between the device and its memory, estimated
    peak_flops_per_s: float
    peak_bytes_per_s: float

    def shares(self, seconds: float) -> tuple[float, float]:
        """Of `seconds`, that products and that memory would take at best."""
        return self.flops / self.peak_flops_per_s / seconds, self.bytes / self.peak_bytes_per_s / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Document, form="serin.store.receipt", omit=("environment",)):
    stage: str
    started: float  # seconds since 1970
    seconds: float
    device: tuple[DeviceCost, ...]
    rows: int | None
    rows_per_s: float | None
    data_wait_share: float | None
    mfu: float | None  # share of the products that the devices could have done in the time of work
    joules: float | None  # of all devices together
    cost: float | None  # at SERIN_PRICE_PER_HOUR, per GPU, or for the machine without
    bound: Bound | None  # what would have to become faster first
    advice: str
    waits: tuple[Wait, ...] = ()  # the longest, in and before the work
    environment: str | None = None  # in which the user's code ran

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def added(receipts: Sequence[Receipt]) -> Receipt:
    """The receipt of several attempts at the same work: time, energy and money together, the rest of the last one."""
    ids = dict.fromkeys(cost.id for each in receipts for cost in each.device)
    return replace(
        receipts[-1],
        started=receipts[0].started,
        seconds=sum(each.seconds for each in receipts),
        device=tuple(
            _together([cost for each in receipts for cost in each.device if cost.id == device])
            for device in ids
        ),
        joules=known_sum(each.joules for each in receipts),
        cost=known_sum(each.cost for each in receipts),
    )


def _together(costs: Sequence[DeviceCost]) -> DeviceCost:
    """One device in several attempts."""
    busy = [(cost.busy_share, cost.booked_s) for cost in costs if cost.busy_share is not None]
    seconds = sum(booked for _, booked in busy)
    return replace(
        costs[-1],
        booked_s=sum(cost.booked_s for cost in costs),
        busy_share=sum(share * booked for share, booked in busy) / seconds if seconds else None,
        peak_bytes=max((cost.peak_bytes for cost in costs if cost.peak_bytes is not None), default=None),
        joules=known_sum(cost.joules for cost in costs),
    )


def known_sum(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What the block under `measure` tells about itself; `receipt` is there when the block has ended."""

    watch: Watch
    rows: int | None = None
    work_s: float | None = None  # the part of the time in which rows were worked on; the whole when not told
    data_wait_share: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by device id
    work: Work | None = None
    waits: list[Wait] = field(default_factory=list)
    receipt: Receipt | None = None


@contextmanager
def measure(stage: str, devices: Sequence[Device] = ()) -> Iterator[Measurement]:
    """Time the block and watch its devices, or the CPU without. A receipt is made also when the block fails: it was
    paid for."""
    watch: Watch = GpuWatch(devices) if devices else CpuWatch()
    measurement = Measurement(watch=watch)
    started, clock = time.time(), time.perf_counter()
    watch.start()
    try:
        yield measurement
    finally:
        seconds = time.perf_counter() - clock
        costs = watch.stop(seconds, measurement.peak_bytes)
        measurement.receipt = _receipt(stage, started, seconds, costs, measurement)


def _receipt(
    stage: str, started: float, seconds: float, device: tuple[DeviceCost, ...], measured: Measurement
) -> Receipt:
    work_s = measured.work_s or seconds
    # The driver is sampled all the time; a GPU that idles while processes start is not a GPU that
    # is fed too slowly. A CPU's busy share says nothing of the kind: a step may need one core only.
    busy = [
        min(1.0, cost.busy_share * seconds / work_s)
        for cost in device
        if cost.busy_share is not None and cost.id != "cpu"
    ]
    shares = measured.work.shares(work_s) if measured.work else None
    bound, advice = judge(
        data_wait_share=measured.data_wait_share,
        busy_share=min(busy) if busy else None,
        work_share=None if measured.work_s is None else measured.work_s / seconds,
        product_share=shares[0] if shares else None,
        memory_share=shares[1] if shares else None,
    )
    price = environment.price_per_hour()
    return Receipt(
        stage=stage,
        started=started,
        seconds=seconds,
        device=device,
        rows=measured.rows,
        rows_per_s=None if measured.rows is None else measured.rows / work_s,
        data_wait_share=measured.data_wait_share,
        mfu=None if shares is None else shares[0],
        joules=known_sum(cost.joules for cost in device),
        cost=None if price is None else price * sum(cost.booked_s for cost in device) / 3600,
        bound=bound,
        advice=advice,
        waits=longest(measured.waits),
        environment=None if entered() is None else str(entered()),
    )


def judge(
    *,
    data_wait_share: float | None,
    busy_share: float | None,
    work_share: float | None,
    product_share: float | None = None,
    memory_share: float | None = None,
) -> tuple[Bound | None, str]:
    """Returns the bottleneck of the stage and one line of advice. None: nothing was measured that could show it.

    `work_share` is of the whole time, all others are of the time of work. The last two are the roofline: how much of
    that time the device would need at best for its products, and for moving bytes.
    """
    if work_share is not None and work_share < _MOSTLY_START:
        advice = f"work took {work_share:.0%} of the time, the rest was start and end: a faster device gains little"
        return "start", advice
    if data_wait_share is not None and data_wait_share > _WAITS_FOR_DATA:
        share = f"{data_wait_share:.0%}"
        return "data", f"{share} of the work went into waiting for rows: faster storage or more memory helps"
    if busy_share is not None and busy_share < _IDLE_BELOW:
        advice = (
            f"the GPU was busy {busy_share:.0%} of the work: raise training.batch_rows or book fewer GPUs"
        )
        return "launch", advice
    if product_share is not None and memory_share is not None:
        return _under_the_roof(product_share, memory_share)
    if data_wait_share is None and busy_share is None:
        return None, ""
    return "compute", ""


def _under_the_roof(product_share: float, memory_share: float) -> tuple[Bound, str]:
    best = max(product_share, memory_share)
    if best < _FAR_FROM_THE_ROOF:
        return "launch", (
            f"at best the same would take {best:.0%} of the time, the rest is many small operations: raise "
            "training.batch_rows, or set training.execution to cuda_graph or compiled"
        )
    if memory_share > product_share:
        return "memory", (
            f"moving numbers is {memory_share:.0%} of the work: a smaller model.embedding or "
            "training.embedding_updates: sparse moves fewer"
        )
    return "compute", (
        f"products are {product_share:.0%} of the work: a lower training.precision where the hardware has one, or "
        "more devices"
    )
