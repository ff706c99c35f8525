"""Which GPUs are here, who holds them, and what the driver measures on them.

A lease is an flock per device: the kernel frees it when its holder dies, however it dies. NVML is spoken to directly
(the library comes with the driver), so that nothing has to be installed for it. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from serin import environment
from serin.errors import LeaseUnavailable, SpecError

_POLL_S = 0.05
_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU. `id` is what CUDA_VISIBLE_DEVICES takes: the driver's UUID."""

    id: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a device."""

    device: str
    pid: int
    host: str
    user: str
    purpose: str
    since: float

    def __str__(self) -> str:
        minutes = max(0.0, time.time() - self.since) / 60
        purpose = f" ({self.purpose})" if self.purpose else ""
        return (
            f"{self.device}: process {self.pid} of {self.user} on {self.host}{purpose}, for {minutes:.1f} min"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices that are ours until the lease's block ends or this process dies."""

    devices: tuple[Device, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(device.id for device in self.devices)

    @property
    def environment(self) -> dict[str, str]:
        """For child processes. Empty on purpose when nothing is leased: what is not leased is not to be seen."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.ids)}


def inventory() -> tuple[Device, ...]:
    """The GPUs this process may use, in the driver's order; none on a machine without.

    The file named by SERIN_INVENTORY stands in for the driver when it is set. CUDA_VISIBLE_DEVICES, when a container
    or a scheduler has set it, narrows the result: what was not given to us is not ours to lease.
    """
    stand_in = environment.inventory_file()
    found = _read_inventory(stand_in) if stand_in else tuple(_driver_devices())
    return _visible(found, environment.visible_devices())


@contextmanager
def lease(
    count: int,
    *,
    home: Path,
    purpose: str = "",
    wait_s: float = 3600.0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Lease]:
    """Hold `count` devices for the block. Waits in a queue up to `wait_s`, then LeaseUnavailable names the holders.

    Only the head of the queue collects devices, so a request for many is not starved by requests for one, and no two
    can hold half of what the other needs.
    """
    if count == 0:
        yield Lease(devices=())
        return
    devices = inventory()
    if count > len(devices):
        raise LeaseUnavailable(wanted=count, present=len(devices))
    folder = home / "gpus"
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with ExitStack() as held:
        with ExitStack() as queue:
            _wait_for(queue, [folder / "queue.lock"], 1, deadline, lambda: _refuse(count, devices, home), say)
            locks = [folder / f"{_safe(device.id)}.lock" for device in devices]
            taken = _wait_for(held, locks, count, deadline, lambda: _refuse(count, devices, home), say)
        ours = tuple(devices[locks.index(path)] for path in taken)
        for device, file in zip(ours, taken.values(), strict=True):
            _sign(file, device.id, purpose)
        yield Lease(devices=ours)


def holders(home: Path) -> tuple[Holder, ...]:
    """Who holds which device now. Reads only: dead holders do not show, whatever they left in their files."""
    found = []
    for path in sorted((home / "gpus").glob("*.lock")):
        if path.name == "queue.lock":
            continue
        with path.open() as file:
            if _try_lock(file.fileno(), fcntl.LOCK_SH):
                continue
            try:
                found.append(Holder(**json.loads(file.read())))
            except (json.JSONDecodeError, TypeError):
                continue  # taken this instant, not signed yet
    return tuple(found)


def _wait_for(
    stack: ExitStack,
    paths: list[Path],
    count: int,
    deadline: float,
    refuse: Callable[[], LeaseUnavailable],
    say: Callable[[str], None],
) -> dict[Path, int]:
    """Exclusive locks on `count` of `paths`, as file descriptors that `stack` closes."""
    taken: dict[Path, int] = {}
    waiting_since: float | None = None
    while True:
        for path in paths:
            if len(taken) == count:
                return taken
            if path not in taken:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                if _try_lock(file, fcntl.LOCK_EX):
                    stack.callback(os.close, file)
                    os.ftruncate(file, 0)  # what a former holder wrote is no longer true
                    taken[path] = file
                else:
                    os.close(file)
        if len(taken) == count:
            return taken
        now = time.monotonic()
        if now >= deadline:
            raise refuse()
        if waiting_since is None:
            waiting_since = now
            say(f"waiting for {count} GPU(s), at most {deadline - now:.0f} s")
        time.sleep(min(_POLL_S, deadline - now))


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: int, device: str, purpose: str) -> None:
    holder = Holder(
        device=device,
        pid=os.getpid(),
        host=socket.gethostname(),
        user=environment.user(),
        purpose=purpose,
        since=time.time(),
    )
    os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)


def _refuse(count: int, devices: tuple[Device, ...], home: Path) -> LeaseUnavailable:
    return LeaseUnavailable(
        wanted=count, present=len(devices), holders=[str(holder) for holder in holders(home)]
    )


def _safe(device: str) -> str:
    """A device's id as a file name; anything else would be a path."""
    if not _DEVICE_ID.fullmatch(device):
        raise SpecError(where="inventory", problems=[("id", f"{device!r} is no device id")])
    return device


class _InventoryDevice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    name: str = "GPU"
    memory_bytes: int = 0


class _InventoryFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["serin.inventory"]
    version: Literal[1]
    devices: tuple[_InventoryDevice, ...]


def _read_inventory(path: Path) -> tuple[Device, ...]:
    try:
        file = _InventoryFile.model_validate_json(path.read_bytes())
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


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


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

    def busy_share(self, device: str) -> float | None:
        """The share of the last sampling period (about 100 ms) in which a kernel ran."""
        rates = _Utilization()
        return rates.gpu / 100 if self._ask("nvmlDeviceGetUtilizationRates", device, rates) else None

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
