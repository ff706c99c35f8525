"""Leases on GPUs: who may use which device now, and who is next.

A lease is an flock per device: exclusive for a training, shared with a slot for a small stage. The kernel frees it when
its holder dies, for any reason. All requests wait in one queue: urgent ones first, then normal ones, then idle ones,
and within a priority in the order of arrival. A request rises by one priority for each half hour that it has waited, so
that none waits forever. An idle holder is expected to give way (`asked_to_give_way`) to an urgent request at the head
of the queue. Tickets of dead processes are ignored. All of it is in <home>/gpus:

    queue.lock            held while a ticket is numbered; contains the last number
    queue/<number>.json   one ticket each, locked by the process that waits
    <device>.lock         locked by the holder of the whole device; shared by those who have a slot of it
    <device>.slot-<n>     locked by the holder of the slot
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from serin.errors import LeaseUnavailable
from serin.machine import environment
from serin.machine.hardware import Device, inventory
from serin.machine.locks import try_lock, wait_for_lock
from serin.spec.names import Priority

logger = logging.getLogger(__name__)

SLOTS = 4  # shared leases that one device may have at a time
RISES_AFTER_S = 1800.0  # a request that has waited so long counts as one of the next higher priority
_RANKS: dict[str, int] = {"urgent": 0, "normal": 1, "idle": 2}

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

    def __str__(self) -> str:
        how = "" if self.kind == "exclusive" else ", shared"
        return f"{self.device}: {self._who}{how}{_named(self.priority)}, {self._for}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter(_Signed):
    """Who waits for devices."""

    ticket: int
    count: int
    shared: bool
    memory_bytes: int
    priority: Priority = "normal"

    def __str__(self) -> str:
        what = f"{self.count} GPU(s){', shared' if self.shared else ''}"
        return f"{self._who} waits for {what}{_named(self.priority)}, {self._for}"

    @property
    def turn(self) -> tuple[int, int]:
        """The place in the queue: the smallest is next."""
        risen = int((time.time() - self.since) / RISES_AFTER_S)
        return max(0, _RANKS[self.priority] - risen), self.ticket


def _named(priority: Priority) -> str:
    return "" if priority == "normal" else f", {priority}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices that are ours until the lease's block ends or this process dies."""

    devices: tuple[Device, ...]

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
    wait_s: float = 3600.0,
    stop: threading.Event | None = None,
) -> Iterator[Lease]:
    """Hold `count` devices for the block, alone or (`shared`) beside others, with `memory_bytes` free on each.

    Waits in the queue up to `wait_s` or until `stop` is set, then LeaseUnavailable names the holders. Only the head of
    the queue collects devices, so a request for many is not starved by requests for one, and no two can hold half of
    what the other needs. What SERIN_SERVING_MEMORY keeps for served models is given to nobody.
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
    )
    with ExitStack() as held:
        with ExitStack() as queue:
            ticket = _take_ticket(queue, wanted)
            _wait(held, wanted, ticket, time.monotonic() + wait_s, stop)
        yield Lease(devices=tuple(device for device in able if device.id in wanted.taken))


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


def asked_to_give_way(home: Path, ids: Sequence[str]) -> Waiter | None:
    """The urgent request to which the holder of these devices, an idle one, is to give way; None as long as there is
    none.

    Of the idle holders those that began last give way, as many devices as the request is for: they lose least.
    """
    first = next(iter(waiters(home)), None)
    if first is None or first.priority != "urgent":
        return None
    idle = [holder for holder in holders(home) if holder.priority == "idle" and holder.kind == "exclusive"]
    latest = sorted(idle, key=lambda holder: (holder.since, holder.device), reverse=True)[: first.count]
    return first if any(holder.device in ids for holder in latest) else None


class GivingWay:
    """Whether the holder of a lease is to stop: because it was asked to, or to give way.

    `asked` is set for both; `to` names the request it gives way to.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.to: Waiter | None = None

    def look(self, home: Path, ids: Sequence[str], stop: threading.Event) -> None:
        if self.to is None:
            self.to = asked_to_give_way(home, ids)
        if self.to is not None or stop.is_set():
            self.asked.set()


@contextmanager
def giving_way(home: Path, held: Lease, priority: Priority, stop: threading.Event) -> Iterator[GivingWay]:
    """Looks at the queue while the block holds its devices, if they are held by idle work."""
    way, ended = GivingWay(), threading.Event()
    if priority != "idle" or not held.ids:
        way.asked = stop
        yield way
        return

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            way.look(home, held.ids, stop)

    thread = threading.Thread(target=watch, name="giving-way", daemon=True)
    thread.start()
    try:
        yield way
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A request, and the ids of the devices it has got so far."""

    folder: Path
    devices: Sequence[Device]
    count: int
    shared: bool
    memory_bytes: int
    purpose: str
    priority: Priority
    taken: set[str] = field(default_factory=set)

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
                self.taken.add(device.id)
                kind: Literal["exclusive", "shared"] = "shared" if self.shared else "exclusive"
                holder = Holder(
                    device=device.id,
                    kind=kind,
                    memory_bytes=self.memory_bytes,
                    priority=self.priority,
                    **_signature(self.purpose),
                )
                sign(file, holder)
        return len(self.taken) == self.count

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


def _take_ticket(queue: ExitStack, wanted: _Wanted) -> Path:
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
            priority=wanted.priority, **_signature(wanted.purpose),
        )  # fmt: skip
        sign(file, waiter)
        path = folder / f"{number:012d}.json"
        scratch.rename(path)
    queue.callback(path.unlink, missing_ok=True)
    return path


def _wait(
    held: ExitStack, wanted: _Wanted, ticket: Path, deadline: float, stop: threading.Event | None
) -> None:
    home, told = wanted.folder.parent, False
    while True:
        if _is_head(wanted.folder, ticket):
            if wanted.collect(held):
                return
        elif wanted.taken:  # another one became the head: it must not wait for what we have collected
            held.close()
            wanted.taken.clear()
        now = time.monotonic()
        if now >= deadline or (stop is not None and stop.is_set()):
            who = [str(holder) for holder in holders(home)]
            raise LeaseUnavailable(wanted=wanted.count, present=len(wanted.devices), holders=who)
        if not told:
            told = True
            before = [waiter.ticket for waiter in waiters(home)]
            place = before.index(int(ticket.stem)) if int(ticket.stem) in before else 0
            logger.info(
                f"waiting for {wanted.count} GPU(s), at most {deadline - now:.0f} s; {place} before us"
            )
        time.sleep(min(_POLL_S, deadline - now))


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
    os.pwrite(file, json.dumps(asdict(who)).encode(), 0)


def living(paths: Iterable[Path], kind: type[Signed]) -> Iterator[Signed]:
    """What those who live have signed, of the files that hold a `kind`."""
    for path in paths:
        if not is_held(path):
            continue
        try:
            yield kind(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # taken this instant and not signed yet
