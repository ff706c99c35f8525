"""Sends the messages of the alert book, each receiver at its own pace, in threads that nobody waits for.

A message counts as sent once the receiver has accepted it and the book says so. A process that is killed between the
two sends that message again when it restarts: at most one for each receiver.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.channels import Attempt, Channel, channel_of
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.alerts.receivers import Receiver
from serin.monitoring.alerts.records import AlertRecord

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 1.0
_TIDY_S: Final = 10.0
_REPEAT_S: Final = 60.0
_MOST_HUNG: Final = 3  # threads of one receiver that do not return; then it waits for them
_CLOSE_S: Final = 3.0


class Delivery:
    """A thread that sends what is due. `channels` returns the channels by receiver, and may change its answer.

    An attempt that has not ended after `timeout_s` counts as failed, even if its channel never returns.
    """

    def __init__(
        self,
        outbox: Outbox,
        channels: Callable[[], Mapping[str, Channel]],
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox, self._channels, self._timeout_s, self._clock = outbox, channels, timeout_s, clock
        self._attempts: dict[str, Attempt] = {}
        self._hung: list[Attempt] = []
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="alert delivery", daemon=True)
        self._tidied = self._complained = -_TIDY_S - _REPEAT_S

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Gives running attempts a moment to end. The others are made again after a restart."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S + 1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            self._wake.wait(_LOOK_S)
            self._wake.clear()
        deadline = time.monotonic() + _CLOSE_S
        for attempt in self._attempts.values():
            attempt.wait(max(0.0, deadline - time.monotonic()))
        self._guarded(self._record_ended)

    def _look(self) -> None:
        self._guarded(self._record_ended)
        self._guarded(self._begin_due)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Continues after an error of the book, such as a full disk: what was not recorded is tried again."""
        try:
            step()
        except (sqlite3.Error, OSError) as error:
            if time.monotonic() - self._complained >= _REPEAT_S:
                self._complained = time.monotonic()
                log.warning(
                    "alerts cannot be sent now and are tried again: %s: %s", type(error).__name__, error
                )

    def _record_ended(self) -> None:
        for name, attempt in list(self._attempts.items()):
            if not attempt.over:
                continue
            if not attempt.returned:
                self._hung.append(attempt)
            if (problem := attempt.problem) is None:
                self._outbox.record_sent(attempt.message)
            else:
                self._record_failure(attempt.message, problem)
            del self._attempts[name]

    def _record_failure(self, message: Message, problem: str) -> None:
        key, name = message.record.alert.key, message.receiver
        if not self._outbox.record_failure(message, problem, self._clock()):
            log.warning(
                "the alert %s was not delivered to %s in about a day of attempts and is given up: %s",
                key,
                name,
                problem,
            )
        elif time.monotonic() - self._complained >= _REPEAT_S:
            self._complained = time.monotonic()
            log.warning("the alert %s is not delivered to %s yet: %s; it is tried again", key, name, problem)

    def _begin_due(self) -> None:
        channels = self._channels()
        if time.monotonic() - self._tidied >= _TIDY_S:
            self._tidied = time.monotonic()
            if dropped := self._outbox.drop_excess():
                log.warning("too many alerts wait for their receivers: the oldest %d are dropped", dropped)
        self._hung = [each for each in self._hung if not each.returned]
        blocked = {name for name in channels if self._hung_of(name) >= _MOST_HUNG}
        for message in self._outbox.due(self._clock(), busy={*self._attempts, *blocked}):
            if message.receiver in channels:
                self._attempts[message.receiver] = Attempt(
                    message,
                    channels[message.receiver],
                    timeout_s=self._timeout_s,
                    when_done=self._wake.set,
                )

    def _hung_of(self, name: str) -> int:
        return sum(each.message.receiver == name for each in self._hung)


def try_receiver(receiver: Receiver, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns why the receiver did not accept the message within `timeout_s`, or None."""
    attempt = Attempt(_message(receiver.name, time.time()), channel_of(receiver), timeout_s=timeout_s)
    attempt.wait()
    return attempt.problem


def _message(name: str, now: float) -> Message:
    alert = Alert(
        key="test",
        kind="data",
        model="test",
        release="test",
        severity="info",
        title="Test message from Serin",
        text="If you can read this, alerts reach you.",
        since=now,
    )
    record = AlertRecord(
        id=f"test-{uuid.uuid4().hex}",
        alert=alert,
        fired=now,
        seen=now,
        resolved=None,
        acknowledged=None,
        acknowledged_by=None,
        note=None,
        silenced_until=None,
    )
    return Message(number=0, receiver=name, event="fired", record=record)
