"""Leases on GPUs: who may use which device now, and who is next.

A lease is an flock per device: exclusive for a training, shared with a slot for a small stage. The kernel frees it when
its holder dies, for any reason. All requests wait in one queue: urgent ones first, then normal ones, then idle ones,
and within a priority in the order of arrival. A request rises by one priority for each half hour that it has waited, so
that none waits forever. The head of the queue, when it is urgent or has risen so far, asks as many idle holders to give
way (`GivingWay`) as it needs devices. Tickets of dead processes are ignored. All of it is in <home>/gpus:

    queue.lock            held while a ticket is numbered; contains the last number
    queue/<number>.json   one ticket each, locked by the process that waits
    <device>.lock         locked by the holder of the whole device; shared by those who have a slot of it
    <device>.slot-<n>     locked by the holder of the slot
    <device>.asked        locked by the request that asks the holder of the device to give way
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from serin.errors import LeaseUnavailable
from serin.machine import environment
from serin.machine.hardware import Device, inventory
from serin.machine.locks import try_lock, wait_for_lock
from serin.spec.names import Priority

logger = logging.getLogger(__name__)

SLOTS = 4  # shared leases that one device may have at a time
# A request that has waited so long counts as one of the next higher priority. An idle one that rose to the top and then
# got its devices keeps them at least so long.
RISES_AFTER_S = 1800.0
_RANKS: dict[Priority, int] = {"urgent": 0, "normal": 1, "idle": 2}

_POLL_S, _LOOK_S = 0.05, 0.2
Signed = TypeVar("Signed", bound="_Signed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """A process that holds or waits, as it has signed its file."""

    pid: int
    host: str
    user: str
    purpose: str
    since: float

    @property
    def _who(self) -> str:
        return (
            f"process {self.pid} of {self.user} on {self.host}{f' ({self.purpose})' if self.purpose else ''}"
        )

    @property
    def _for(self) -> str:
        return f"for {max(0.0, time.time() - self.since) / 60:.1f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(_Signed):
    """Who holds a device, or a slot of it."""

    device: str
    kind: Literal["exclusive", "shared"] = "exclusive"
    memory_bytes: int = 0  # that a shared lease asked for
    priority: Priority = "normal"
    gives_way_from: float | None = None  # see Lease

    @property
    def gives_way(self) -> bool:
        return self.gives_way_from is not None and self.gives_way_from <= steady()

    def __str__(self) -> str:
        how = "" if self.kind == "exclusive" else ", shared"
        return f"{self.device}: {self._who}{how}{_named(self.priority)}, {self._for}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter(_Signed):
    """Who waits for devices.

    `waits_from`: since when, by `steady`; earlier by what a request that gave way had waited before.
    """

    ticket: int
    count: int
    shared: bool
    memory_bytes: int
    waits_from: float
    priority: Priority = "normal"

    def __str__(self) -> str:
        what = f"{self.count} GPU(s){', shared' if self.shared else ''}"
        risen = "" if self.counts_as == self.priority else f", counts as {self.counts_as} after its wait"
        return f"{self._who} waits for {what}{_named(self.priority)}{risen}, {self._for}"

    @property
    def counts_as(self) -> Priority:
        return _risen(self.priority, self.waits_from)

    @property
    def turn(self) -> tuple[int, int]:
        """The place in the queue: the smallest is next."""
        return _RANKS[self.counts_as], self.ticket


def steady() -> float:
    """A clock that nobody sets, the same for all processes since the machine was started."""
    return time.monotonic()


def _risen(priority: Priority, waits_from: float) -> Priority:
    """What a request counts as after its wait. One with another machine's clock never falls below its priority."""
    steps = max(0, int((steady() - waits_from) / RISES_AFTER_S))
    rank = max(0, _RANKS[priority] - steps)
    return next(name for name in _RANKS if _RANKS[name] == rank)


def _named(priority: Priority) -> str:
    return "" if priority == "normal" else f", {priority}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices that are ours until the lease's block ends or this process dies.

    `waited_s`: how long the request was in the queue. `gives_way_from`: since when it gives way when it is asked, by
    `steady`; None: it never does.
    """

    devices: tuple[Device, ...]
    waited_s: float = 0.0
    gives_way_from: float | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(device.id for device in self.devices)


@contextmanager
def lease(
    count: int,
    *,
    home: Path,
    purpose: str = "",
    shared: bool = False,
    memory_bytes: int = 0,
    priority: Priority = "normal",
    gives_way: bool = False,
    after: Lease | None = None,
    wait_s: float = 3600.0,
    stop: threading.Event | None = None,
) -> Iterator[Lease]:
    """Hold `count` devices for the block, alone or (`shared`) beside others, with `memory_bytes` free on each.

    Waits in the queue up to `wait_s` or until `stop` is set, then LeaseUnavailable names the holders. Only the head of
    the queue collects devices, so a request for many is not starved by requests for one, and no two can hold half of
    what the other needs. What SERIN_SERVING_MEMORY keeps for served models is given to nobody. `gives_way`: the holder
    looks at GivingWay. `after`: the lease that this work has given back; it waits as long as it takes, and keeps the
    time that it had waited.
    """
    if count == 0:
        yield Lease(devices=())
        return
    devices = inventory()
    able = [device for device in devices if memory_bytes <= offered_bytes(device)]
    if count > len(able):
        raise LeaseUnavailable(wanted=count, present=len(devices), memory_bytes=memory_bytes)
    wanted = _Wanted(
        folder=home / "gpus",
        devices=able,
        count=count,
        shared=shared,
        memory_bytes=memory_bytes,
        purpose=purpose,
        priority=priority,
        gives_way=gives_way,
        waits_from=steady() - (after.waited_s if after else 0.0),
    )
    with ExitStack() as held:
        with ExitStack() as queue:
            ticket, waiter = _take_ticket(queue, wanted)
            _wait(held, wanted, ticket, waiter, math.inf if after else time.monotonic() + wait_s, stop)
        yield Lease(
            devices=tuple(device for device in able if device.id in wanted.taken),
            waited_s=steady() - wanted.waits_from,
            gives_way_from=wanted.sign_complete(),
        )


def offered_bytes(device: Device) -> int:
    """What leases may give away of a device's memory: all but the share of served models."""
    return max(0, device.memory_bytes - (environment.number_of_bytes("SERIN_SERVING_MEMORY") or 0))


def holders(home: Path) -> tuple[Holder, ...]:
    """Who holds which device now. Reads only: dead holders do not show, whatever they left in their files."""
    folder = home / "gpus"
    return tuple(living(sorted([*folder.glob("*.lock"), *folder.glob("*.slot-*")]), Holder))


def waiters(home: Path) -> tuple[Waiter, ...]:
    """Who waits, the next one first."""
    return tuple(sorted(living(_tickets(home / "gpus"), Waiter), key=lambda waiter: waiter.turn))


def asked_to_give_way(home: Path) -> dict[str, Waiter]:
    """The devices whose holders are asked to give way, and the request that asks."""
    found = {}
    for path in sorted((home / "gpus").glob("*.asked")):
        for waiter in living([path], Waiter):
            found[path.stem] = waiter
    return found


class GivingWay(threading.Event):
    """Whether the holder of a lease is to end its work: because `stop` is set, or to give way to the request `to`.

    To set it sets `stop`.
    """

    def __init__(self, home: Path, held: Lease, stop: threading.Event) -> None:
        super().__init__()
        self.to: Waiter | None = None
        self._home, self._held, self._stop, self._look_at = home, held, stop, 0.0

    def set(self) -> None:
        self._stop.set()

    def is_set(self) -> bool:
        if self.to is None and not self._stop.is_set():
            self._look()
        return self.to is not None or self._stop.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := end - time.monotonic()) > 0:
            self._stop.wait(min(_LOOK_S, left))
        return self.is_set()

    def _look(self) -> None:
        start, now = self._held.gives_way_from, steady()
        if start is not None and now >= max(start, self._look_at):
            self._look_at = now + _LOOK_S
            asked = asked_to_give_way(self._home)
            self.to = next((asked[device] for device in self._held.ids if device in asked), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A request, and the ids of the devices that it has got so far, and of those whose holders it has asked to give
    way."""

    folder: Path
    devices: Sequence[Device]
    count: int
    shared: bool
    memory_bytes: int
    purpose: str
    priority: Priority
    gives_way: bool
    waits_from: float
    taken: dict[str, tuple[int, Holder]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def collect(self, held: ExitStack) -> bool:
        """Take and sign what is free; True when it is enough. Only for the head of the queue: the next one must find
        what we have signed."""
        for device in self._by_preference():
            if len(self.taken) == self.count:
                break
            if device.id in self.taken:
                continue
            file = self._take_slot(held, device) if self.shared else take(held, self._file(device))
            if file is not None:
                kind: Literal["exclusive", "shared"] = "shared" if self.shared else "exclusive"
                holder = Holder(
                    device=device.id,
                    kind=kind,
                    memory_bytes=self.memory_bytes,
                    priority=self.priority,
                    **_signature(self.purpose),
                )
                sign(file, holder)
                self.taken[device.id] = file, holder
        return len(self.taken) == self.count

    def sign_complete(self) -> float | None:
        """Sign that the devices are given back when their holder is asked, and return from when on."""
        if not self.gives_way:
            return None
        risen = _risen(self.priority, self.waits_from) == "urgent"
        start = steady() + (RISES_AFTER_S if risen else 0.0)
        for file, holder in self.taken.values():
            sign(file, replace(holder, gives_way_from=start))
        return start

    def ask(self, stack: ExitStack, waiter: Waiter) -> None:
        """Ask holders to give way, those that began last first: they lose least. A holder is asked once, and until its
        device is ours it counts as coming, so that no second one stops for the same device."""
        coming = {*self.taken, *self.asked}
        missing, others = self.count - len(coming), {device.id for device in self.devices} - coming
        if missing <= 0 or waiter.counts_as != "urgent":
            return
        able = [
            holder for holder in holders(self.folder.parent) if holder.device in others and holder.gives_way
        ]
        latest = sorted(able, key=lambda holder: (holder.since, holder.device), reverse=True)
        for holder in latest[:missing]:
            file = take(stack, self.folder / f"{holder.device}.asked")
            if file is not None:
                sign(file, waiter)
                self.asked.add(holder.device)

    def _by_preference(self) -> Sequence[Device]:
        """Small stages go where others are already, so that whole devices stay free."""
        if not self.shared:
            return self.devices
        return sorted(self.devices, key=lambda device: not self._sharers(device))

    def _take_slot(self, held: ExitStack, device: Device) -> int | None:
        with ExitStack() as ours:
            if take(ours, self._file(device), shared=True) is None:
                return None
            given = sum(holder.memory_bytes for holder in self._sharers(device))
            if given + self.memory_bytes > offered_bytes(device):
                return None
            for path in self._slots(device):
                file = take(ours, path)
                if file is not None:
                    held.enter_context(ours.pop_all())
                    return file
        return None

    def _sharers(self, device: Device) -> list[Holder]:
        return list(living([path for path in self._slots(device) if path.exists()], Holder))

    def _file(self, device: Device) -> Path:
        return self.folder / f"{device.id}.lock"

    def _slots(self, device: Device) -> list[Path]:
        return [self.folder / f"{device.id}.slot-{number}" for number in range(SLOTS)]


def _take_ticket(queue: ExitStack, wanted: _Wanted) -> tuple[Path, Waiter]:
    """A place in the queue, ours until `queue` is closed.

    The ticket is locked before it has a name that others look for, so that nobody takes it for a dead one's; numbers
    are never used twice, so that who removes a dead ticket cannot hit a living one.
    """
    folder = wanted.folder / "queue"
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as mutex:
        numbered = os.open(wanted.folder / "queue.lock", os.O_RDWR | os.O_CREAT, 0o644)
        mutex.callback(os.close, numbered)
        wait_for_lock(numbered)
        words = os.pread(numbered, 20, 0).decode(errors="replace").strip()
        known = [int(words) if words.isdigit() else 0, *(int(path.stem) for path in _tickets(wanted.folder))]
        number = max(known) + 1
        os.pwrite(numbered, f"{number:<20}".encode(), 0)
        scratch = folder / f".{os.getpid()}-{secrets.token_hex(4)}"
        file = take(queue, scratch)
        assert file is not None, "nobody else knows this name"
        waiter = Waiter(
            ticket=number, count=wanted.count, shared=wanted.shared, memory_bytes=wanted.memory_bytes,
            waits_from=wanted.waits_from, priority=wanted.priority, **_signature(wanted.purpose),
        )  # fmt: skip
        sign(file, waiter)
        path = folder / f"{number:012d}.json"
        scratch.rename(path)
    queue.callback(path.unlink, missing_ok=True)
    return path, waiter


def _wait(
    held: ExitStack,
    wanted: _Wanted,
    ticket: Path,
    waiter: Waiter,
    deadline: float,
    stop: threading.Event | None,
) -> None:
    home, told = wanted.folder.parent, False
    with ExitStack() as asked:
        while True:
            if _is_head(wanted.folder, ticket):
                if wanted.collect(held):
                    return
                wanted.ask(asked, waiter)
            elif wanted.taken or wanted.asked:
                # Another one is the head now: it must not wait for what is ours.
                asked.close()
                held.close()
                wanted.asked.clear()
                wanted.taken.clear()
            now = time.monotonic()
            if now >= deadline or (stop is not None and stop.is_set()):
                who = [str(holder) for holder in holders(home)]
                raise LeaseUnavailable(wanted=wanted.count, present=len(wanted.devices), holders=who)
            if not told:
                told = True
                _tell_place(home, waiter, deadline - now)
            time.sleep(min(_POLL_S, deadline - now))


def _tell_place(home: Path, waiter: Waiter, most_s: float) -> None:
    tickets = [each.ticket for each in waiters(home)]
    place = tickets.index(waiter.ticket) if waiter.ticket in tickets else 0
    bound = "" if math.isinf(most_s) else f", at most {most_s:.0f} s"
    logger.info(f"waiting for {waiter.count} GPU(s){bound}; {place} before us")


def _is_head(folder: Path, ticket: Path) -> bool:
    """Returns whether no live ticket precedes this one; those of dead processes are removed."""
    tickets = _tickets(folder)
    for path in tickets:
        if path != ticket and not is_held(path):
            path.unlink(missing_ok=True)
    first = next(iter(waiters(folder.parent)), None)
    # None: somebody has removed our file; the order of the others is still right.
    return first is None or first.ticket == int(ticket.stem)


def _tickets(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "queue").glob("*.json") if path.stem.isdigit())


def _signature(purpose: str) -> dict[str, Any]:
    """This process, now."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "user": environment.user()}
    return {**who, "purpose": purpose, "since": time.time()}


def take(stack: ExitStack, path: Path, *, shared: bool = False, create: bool = True) -> int | None:
    """A lock that `stack` releases; None when another process has it. An exclusive one empties the file: what a former
    holder wrote is no longer true."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
    if not try_lock(file, shared=shared):
        os.close(file)
        return None
    stack.callback(os.close, file)
    if not shared:
        os.ftruncate(file, 0)
    return file


def is_held(path: Path) -> bool:
    """Whether somebody who lives holds it exclusively."""
    with ExitStack() as moment:
        try:
            return take(moment, path, shared=True, create=False) is None
        except FileNotFoundError:
            return False


def sign(file: int, who: _Signed) -> None:
    content = json.dumps(asdict(who)).encode()
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))


def living(paths: Iterable[Path], kind: type[Signed]) -> Iterator[Signed]:
    """What those who live have signed, of the files that hold a `kind`."""
    for path in paths:
        if not is_held(path):
            continue
        try:
            yield kind(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # taken this instant and not signed yet
