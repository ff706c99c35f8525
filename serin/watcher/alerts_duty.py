"""The duty that delivers alerts: to the watcher's log, to Prefect as events, and to the receivers of the home."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from serin.errors import SerinError
from serin.machine.in_memory import memory_folder
from serin.monitoring.alerts.book import LOG, PREFECT
from serin.monitoring.alerts.delivery import Channel, Delivery, LogChannel, body, channel_of
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.alerts.receivers import ReceiverFile
from serin.prefect import rest_api
from serin.prefect.login import find_server
from serin.watcher.duty import Commit, Duty, nothing

log = logging.getLogger(__name__)

# Of ids that are the same when an event is sent again.
_EVENTS = uuid.UUID("6f3d2a52-5c0e-4c53-9a44-0f7a6c1f9a6e")


class AlertsDuty(Duty):
    """Starts the threads that deliver: one for the book, and one for its second in memory, which is used where the disk
    is full."""

    name, every_s = "alerts", 5.0

    def __init__(self, home: Path, stack: Path | None = None, commit: Commit = nothing) -> None:
        """`home`: with the book and the receivers. `stack`: the home of the stack; None: `home`. `commit`: called
        before anything is sent."""
        books = [home, *([memory] if (memory := memory_folder(home)) else [])]
        channels = Channels(home, stack or home)
        self._deliveries = [Delivery(Outbox(each), channels, commit=commit) for each in books]
        self._started = False

    @classmethod
    def of_host(cls, home: Path) -> Self:
        """Writes alerts about this host to the log alone. The leading watcher of all hosts sends them."""
        made = cls(home)
        made._deliveries = [Delivery(Outbox(home), lambda: {LOG: LogChannel()})]
        return made

    def tick(self, now: float) -> None:
        del now
        if not self._started:
            self._started = True
            for each in self._deliveries:
                each.start()

    def close(self) -> None:
        for each in self._deliveries:
            each.close()


class Channels:
    """Returns the channels of a home by receiver. Receivers that were added or removed are noticed at the next call.
    One that cannot be used keeps its messages waiting, and is reported once."""

    def __init__(self, home: Path, stack: Path) -> None:
        self._home, self._stack = home, stack
        self._signature: tuple[int, int] | None = None
        self._channels: dict[str, Channel] = {}

    def __call__(self) -> Mapping[str, Channel]:
        signature = self._read_signature()
        if not self._channels or signature != self._signature:
            self._channels = {LOG: LogChannel(), PREFECT: PrefectChannel(self._stack), **self._receivers()}
            self._signature = signature
        return self._channels

    def _read_signature(self) -> tuple[int, int] | None:
        try:
            found = ReceiverFile(self._home).path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _receivers(self) -> dict[str, Channel]:
        try:
            receivers = ReceiverFile(self._home).read()
        except SerinError as error:
            log.warning("alerts reach no receiver: %s", error)
            return {}
        channels: dict[str, Channel] = {}
        for receiver in receivers:
            try:
                channels[receiver.name] = channel_of(receiver)
            except SerinError as error:
                log.warning("alerts do not reach %s: %s", receiver.name, error)
                channels[receiver.name] = UnusableChannel(error)
        return channels


class UnusableChannel:
    """Fails every attempt with the reason why the receiver cannot be used here."""

    def __init__(self, error: SerinError) -> None:
        self._error = error

    def send(self, message: Message) -> None:
        del message
        raise self._error


class PrefectChannel:
    """Sends an event `serin.<kind>` about `serin.model.<model>`, and `serin.<kind>.resolved` or `.closed` at the end.
    Where neither the stack nor PREFECT_API_URL has a server, there is nothing to do."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def send(self, message: Message) -> None:
        server = find_server(self._home)
        if server is not None:
            rest_api.call(server.api, "POST", "/events", [event(message)])


def event(message: Message) -> dict[str, Any]:
    alert, record = message.record.alert, message.record
    name = f"serin.{alert.kind}" if message.event == "fired" else f"serin.{alert.kind}.{message.event}"
    occurred = record.fired if message.event == "fired" or not record.resolved else record.resolved
    return {
        "id": str(uuid.uuid5(_EVENTS, message.id)),
        "occurred": datetime.fromtimestamp(occurred, UTC).isoformat(),
        "event": name,
        "resource": {
            "prefect.resource.id": f"serin.model.{alert.model}" if alert.model else "serin.stack",
            "prefect.resource.name": alert.model or "stack",
            "serin.model": alert.model,
            "serin.release": alert.release,
        },
        "payload": body(message),
    }
