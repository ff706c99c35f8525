"""Reports the current use of this machine's GPUs: leases, served releases, and the driver's figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serin.errors import SupervisorGone
from serin.machine import environment
from serin.machine.hardware import Device, Nvml, inventory
from serin.machine.leases import Holder, holders, offered_bytes
from serin.machine.process import ProcessHost
from serin.serving.triton.release_record import reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRelease:
    """A release on a GPU.

    `used_bytes`: the memory of its process and that process's children, as the driver reports it; None if unknown.
    """

    release: str
    pid: int
    reserved_bytes: int
    used_bytes: int | None = None

    def __str__(self) -> str:
        used = "" if self.used_bytes is None else f", {self.used_bytes / 1e6:,.0f} MB used"
        return f"{self.release}: served by process {self.pid}, {self.reserved_bytes / 1e6:,.0f} MB reserved{used}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """The use of one GPU.

    `used_bytes`: by all processes together, also those that Serin does not know; None if the driver does not report it.
    """

    device: Device
    holders: tuple[Holder, ...]
    releases: tuple[ServedRelease, ...]
    used_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.device),
            "offered_bytes": offered_bytes(self.device),
            "used_bytes": self.used_bytes,
            "holders": [asdict(holder) for holder in self.holders],
            "releases": [asdict(release) for release in self.releases],
        }


def read_gpu_use(home: Path, host: ProcessHost | None = None) -> list[GpuUse]:
    """Returns one entry for each GPU of this machine. `host`: the host of the releases' processes; None: the
    supervisor."""
    held, reserved = holders(home), reserved_bytes(home / "releases")
    if host is None and reserved:
        from serin.host.supervisor import Supervisor  # here: few machines serve releases on GPUs

        host = Supervisor(home)
    nvml = None if environment.path("SERIN_INVENTORY") else Nvml.open()
    found = []
    for device in inventory():
        free = nvml.free_bytes(device.id) if nvml else None
        by_process = nvml.process_bytes(device.id) if nvml else {}
        served = [
            ServedRelease(
                release=release,
                pid=pid,
                reserved_bytes=size,
                used_bytes=_with_children(pid, by_process) or None,
            )
            for release, size in sorted(reserved.get(device.id, {}).items())
            if host is not None and (pid := _pid(host, release)) is not None
        ]
        found.append(
            GpuUse(
                device=device,
                holders=tuple(holder for holder in held if holder.device == device.id),
                releases=tuple(served),
                used_bytes=None if free is None else device.memory_bytes - free,
            )
        )
    return found


def _pid(host: ProcessHost, release: str) -> int | None:
    """Returns the pid of a release; None when it does not run: one that was stopped with its stack keeps its record."""
    try:
        return host.pid(release)
    except SupervisorGone:
        return None


def _with_children(pid: int, by_process: dict[int, int]) -> int:
    """Returns the memory of a process and its children, because Triton's Python backend runs models in child
    processes."""
    from serin.machine.usage import process_tree  # here: with psutil

    return sum(by_process.get(each, 0) for each in process_tree(pid))
