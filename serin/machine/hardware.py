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
from typing import Any, Literal

from serin.errors import SpecError
from serin.machine import environment

_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def core_count() -> int:
    """The number of CPU cores that this process may use. Slurm does not bind a job to its cores everywhere."""
    given, _ = environment.slurm_share()
    return min(len(os.sched_getaffinity(0)), given or os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU. `id` is what CUDA_VISIBLE_DEVICES takes: the driver's UUID."""

    id: str
    name: str
    memory_bytes: int


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
    stand_in = environment.inventory_file()
    found = _read_inventory(stand_in) if stand_in else tuple(_driver_devices())
    return _visible(found, environment.visible_devices())


def _safe(device: str) -> str:
    """A device's id as a file name; anything else would be a path."""
    if not _DEVICE_ID.fullmatch(device):
        raise SpecError(where="inventory", problems=[("id", f"{device!r} is not a device id")])
    return device


def _read_inventory(path: Path) -> tuple[Device, ...]:
    from pydantic import BaseModel, ConfigDict, ValidationError  # the first model of a process takes 25 ms

    class InventoryDevice(BaseModel):
        model_config = ConfigDict(extra="forbid")
        id: str
        name: str = "GPU"
        memory_bytes: int = 0

    class InventoryFile(BaseModel):
        model_config = ConfigDict(extra="forbid")
        format: Literal["serin.inventory"]
        version: Literal[1]
        devices: tuple[InventoryDevice, ...]

    try:
        file = InventoryFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise SpecError(where=f"SERIN_INVENTORY={path}", problems=[("", str(error))]) from error
    return tuple(
        Device(id=_safe(found.id), name=found.name, memory_bytes=found.memory_bytes) for found in file.devices
    )


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


def _driver_devices() -> list[Device]:
    nvml = Nvml.open()
    return nvml.devices() if nvml else []


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

    def driver_version(self) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._library.nvmlSystemGetDriverVersion(buffer, 96)
        return buffer.value.decode()

    def cuda_version(self) -> str:
        """The newest CUDA that the driver supports."""
        number = ctypes.c_int()
        self._library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def busy_share(self, device: str) -> float | None:
        """The share of the last sampling period (about 100 ms) in which a kernel ran."""
        rates = _Utilization()
        return rates.gpu / 100 if self._ask("nvmlDeviceGetUtilizationRates", device, rates) else None

    def free_bytes(self, device: str) -> int | None:
        memory = _Memory()
        return int(memory.free) if self._ask("nvmlDeviceGetMemoryInfo", device, memory) else None

    def process_bytes(self, device: str) -> dict[int, int]:
        """Memory by the ids of processes that compute on it; without those whose memory the driver does not tell, as
        for processes of another container."""
        handle = ctypes.c_void_p()
        if self._library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle)) != 0:
            return {}
        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if ask is None or ask(handle, ctypes.byref(count), found) != 0:
            return {}
        return {each.pid: each.bytes for each in found[: count.value] if each.bytes != _NOT_TOLD}

    def compute_capability(self, device: str) -> str | None:
        """The compute capability, such as "9.0"; None when the driver does not tell it."""
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if self._library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle)) != 0:
            return None
        ask = self._library.nvmlDeviceGetCudaComputeCapability
        if ask(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
            return None
        return f"{major.value}.{minor.value}"

    def joules(self, device: str) -> float | None:
        """Energy since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        known = self._ask("nvmlDeviceGetTotalEnergyConsumption", device, millijoules)
        return millijoules.value / 1000 if known else None

    def _ask(self, function: str, device: str, answer: Any) -> bool:
        handle = ctypes.c_void_p()
        code = self._library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        return bool(code == 0 and getattr(self._library, function)(handle, ctypes.byref(answer)) == 0)

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        getattr(self._library, function)(handle, buffer, 96)
        return buffer.value.decode()
