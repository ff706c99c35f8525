"""Lists the GPUs of this machine and reads the driver's measurements. leases.py decides who may use them.

It calls NVML directly (the library comes with the driver), so that nothing has to be installed for it. It does not
import torch.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import SpecError
from serin.machine import environment
from serin.machine.typed_json import Document

_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def core_count() -> int:
    """The number of CPU cores that this process may use. Slurm does not bind a job to its cores everywhere."""
    given, _ = environment.slurm_share()
    return min(len(os.sched_getaffinity(0)), given or os.cpu_count() or 1)


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU. `id` is what CUDA_VISIBLE_DEVICES takes: the driver's UUID."""

    id: str
    name: str = "GPU"
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inventory(Document, form="serin.inventory"):
    devices: tuple[Device, ...]


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Of this machine, or of the container if that is given less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def inventory() -> tuple[Device, ...]:
    """The GPUs this process may use, in the driver's order; none on a machine without.

    The file named by SERIN_INVENTORY replaces the driver when it is set. CUDA_VISIBLE_DEVICES, when a container
    or a scheduler has set it, narrows the result: what was not given to us is not ours to lease.
    """
    stand_in = environment.path("SERIN_INVENTORY")
    if stand_in:
        found = _read_inventory(stand_in)
    else:
        nvml = Nvml.open()
        found = tuple(nvml.devices()) if nvml else ()
    return _visible(found, environment.visible_devices())


def _read_inventory(path: Path) -> tuple[Device, ...]:
    try:
        devices = _Inventory.load(path.read_bytes()).devices
    except (OSError, ValueError) as error:
        raise SpecError(where=f"SERIN_INVENTORY={path}", problems=[("", str(error))]) from error
    for device in devices:
        if not _DEVICE_ID.fullmatch(device.id):  # it is a part of file names
            raise SpecError(where="inventory", problems=[("id", f"{device.id!r} is not a device id")])
    return devices


def _visible(devices: tuple[Device, ...], visible: str | None) -> tuple[Device, ...]:
    if visible is None:
        return devices
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        index = int(word) if word.isdigit() else None
        matches = [
            device
            for position, device in enumerate(devices)
            if position == index or device.id.startswith(word or " ")
        ]
        chosen += [device for device in matches[:1] if device not in chosen]
    return tuple(chosen)


_MOST_PROCESSES = 256
_NOT_TOLD = 2**64 - 1


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Sample(ctypes.Structure):
    _fields_ = (("microseconds", ctypes.c_ulonglong), ("percent", ctypes.c_uint), ("unused", ctypes.c_uint))


_GPU_UTILIZATION, _MOST_SAMPLES = 1, 1024
_SUCCESS, _NOTHING_NEW = 0, 6


class Nvml:
    """The driver's own measurements. `open` gives None where there is no driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Nvml | None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def devices(self) -> list[Device]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                continue
            memory = _Memory()
            self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            uuid, name = self._text("nvmlDeviceGetUUID", handle), self._text("nvmlDeviceGetName", handle)
            found.append(Device(id=uuid, name=name, memory_bytes=memory.total))
        return found

    def busy_share(self, device: str) -> float | None:
        """The share of the last sampling period (1/6 to 1 s) in which a kernel ran."""
        rates = _Utilization()
        return rates.gpu / 100 if self._ask("nvmlDeviceGetUtilizationRates", device, rates) else None

    def busy_samples(self, device: str, since_us: int) -> list[tuple[int, float]] | None:
        """The sampling periods that ended after `since_us`, oldest first: the end of each in microseconds, and its
        busy share. The driver keeps those of the last seconds. None where it keeps none."""
        kind, count = ctypes.c_int(), ctypes.c_uint(_MOST_SAMPLES)
        found = (_Sample * _MOST_SAMPLES)()
        wanted = (ctypes.c_int(_GPU_UTILIZATION), ctypes.c_ulonglong(since_us))
        code = self._code("nvmlDeviceGetSamples", device, *wanted, *map(ctypes.byref, (kind, count, found)))
        if code == _NOTHING_NEW:
            return []
        if code != _SUCCESS:
            return None
        return [(each.microseconds, each.percent / 100) for each in found[: count.value]]

    def free_bytes(self, device: str) -> int | None:
        memory = _Memory()
        return int(memory.free) if self._ask("nvmlDeviceGetMemoryInfo", device, memory) else None

    def process_bytes(self, device: str) -> dict[int, int]:
        """Memory by the ids of processes that compute on it; without those whose memory the driver does not tell, as
        for processes of another container."""
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if not self._ask("nvmlDeviceGetComputeRunningProcesses_v3", device, count, found):
            return {}
        return {each.pid: each.bytes for each in found[: count.value] if each.bytes != _NOT_TOLD}

    def joules(self, device: str) -> float | None:
        """Energy since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        known = self._ask("nvmlDeviceGetTotalEnergyConsumption", device, millijoules)
        return millijoules.value / 1000 if known else None

    def _ask(self, function: str, device: str, *answers: Any) -> bool:
        """Fills in the answers; False when the driver lacks the function or cannot tell."""
        return self._code(function, device, *map(ctypes.byref, answers)) == _SUCCESS

    def _code(self, function: str, device: str, *arguments: Any) -> int | None:
        """The driver's answer to a call about a device; None when it lacks the function or the device."""
        handle, ask = ctypes.c_void_p(), getattr(self._library, function, None)
        code = self._library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        return int(ask(handle, *arguments)) if ask and code == _SUCCESS else None

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        getattr(self._library, function)(handle, buffer, 96)
        return buffer.value.decode()
