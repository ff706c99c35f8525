"""Sends the messages of the alert book, each receiver at its own pace, in threads that nobody waits for: as a log line,
through a webhook, or through apprise for mail, chat and telephone.

A message counts as sent once the receiver has accepted it and the book says so. A process that is killed between the
two sends that message again when it restarts: at most one for each receiver.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any, Final, Protocol

from serin.errors import ExtraMissing, ReceiverRefused, SerinError
from serin.machine.audit import one_line
from serin.monitoring.alerts.alert import Alert, AlertRecord
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.alerts.receivers import Receiver

log = logging.getLogger(__name__)
_alert_log = logging.getLogger("serin.alerts")

TIMEOUT_S: Final = 15.0
_LOOK_S: Final = 1.0
_TIDY_S: Final = 10.0
_REPEAT_S: Final = 60.0
_MOST_HUNG: Final = 3  # threads of one receiver that do not return; then it waits for them
_CLOSE_S: Final = 3.0
_SOCKET_S: Final = 10.0
_SEVERITY: Final = {"page": "failure", "ticket": "warning", "info": "info"}  # apprise's words


class Delivery:
    """A thread that sends what is due. `channels` returns the channels by receiver, and may change its answer.
    `commit` is called before anything is sent, and may refuse that with an error.

    An attempt that has not ended after `timeout_s` counts as failed, even if its channel never returns.
    """

    def __init__(
        self,
        outbox: Outbox,
        channels: Callable[[], Mapping[str, Channel]],
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._outbox, self._channels, self._timeout_s, self._clock = outbox, channels, timeout_s, clock
        self._commit = commit
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
        except (sqlite3.Error, OSError, SerinError) as error:
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
        hung = [each.message.receiver for each in self._hung]
        blocked = {name for name in channels if hung.count(name) >= _MOST_HUNG}
        due = self._outbox.due(self._clock(), busy={*self._attempts, *blocked})
        if due:
            self._commit()
        for message in due:
            if message.receiver in channels:
                self._attempts[message.receiver] = Attempt(
                    message,
                    channels[message.receiver],
                    timeout_s=self._timeout_s,
                    when_done=self._wake.set,
                )


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
    record = AlertRecord(id=f"test-{uuid.uuid4().hex}", alert=alert, fired=now, seen=now)
    return Message(number=0, receiver=name, event="fired", record=record)


def body(message: Message) -> dict[str, Any]:
    """The JSON object that a webhook gets. `id` is the same when a message is repeated."""
    record = message.record
    return {
        "format": "serin.alert",
        "version": 1,
        "id": message.id,
        "event": message.event,
        **asdict(message.record.alert),
        "fired": record.fired,
        "resolved": None if message.event == "fired" else record.resolved,
    }


class LogChannel:
    """One line in the log of the process that sends."""

    def send(self, message: Message) -> None:
        alert = message.record.alert
        if message.event == "fired":
            _alert_log.warning(
                "%s", one_line(f"ALERT {alert.severity} {alert.key}: {alert.title}. {alert.text}")
            )
        else:
            _alert_log.info("%s", one_line(f"{message.record.ended} {alert.key}: {alert.title}"))


class WebhookChannel:
    """Posts `body` as JSON. Any answer but 2xx is a failure, a redirection too: it could lead anywhere."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, message: Message) -> None:
        request = urllib.request.Request(  # noqa: S310 (http and https only: Receiver.is_webhook)
            self._receiver.url.get_secret_value(),
            method="POST",
            data=json.dumps(body(message), default=str).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "serin"},
        )
        try:
            with _OPENER.open(request, timeout=_SOCKET_S) as response:
                response.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            raise DeliveryFailed(f"the receiver answered with {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DeliveryFailed(_reason(error)) from None


class AppriseChannel:
    """Sends a short text through apprise, which knows mail, Slack, Teams and about a hundred more."""

    def __init__(self, receiver: Receiver) -> None:
        self._sender = load_apprise(receiver)

    def send(self, message: Message) -> None:
        alert = message.record.alert
        has_name = alert.title.casefold().startswith(alert.model.casefold())  # also without a model
        named = alert.title if has_name else f"{alert.model}: {alert.title}"
        title = named if message.event == "fired" else f"{message.event.capitalize()}: {named}"
        about = f"model {alert.model}, release {alert.release}, " if alert.model else ""
        why = f"{message.record.ended}\n\n" if message.event == "closed" else ""
        text = f"{why}{alert.text}\n\n{about}alert {alert.key}"
        kind = {"fired": _SEVERITY[alert.severity], "resolved": "success", "closed": "info"}[message.event]
        if not self._sender.notify(title=title, body=text, notify_type=kind):
            raise DeliveryFailed("the receiver did not accept the message")


def channel_of(receiver: Receiver) -> Channel:
    """Raises ReceiverRefused or ExtraMissing when messages cannot be sent to this URL."""
    return WebhookChannel(receiver) if receiver.is_webhook else AppriseChannel(receiver)


def load_apprise(receiver: Receiver) -> Any:
    try:
        import apprise
    except ImportError:
        raise ExtraMissing(
            package="apprise, which sends alerts to other URLs than http(s)", extra="alerts"
        ) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # the lines of both contain parts of URLs
    logging.getLogger("urllib3").setLevel(logging.INFO)
    sender = apprise.Apprise()
    if not sender.add(receiver.url.get_secret_value()):
        reason = "apprise cannot use this URL; https://appriseit.com/services lists the forms it knows"
        raise ReceiverRefused(name=receiver.name, reason=reason)
    return sender


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        del req, fp, code, msg, headers, newurl


_OPENER: Final = urllib.request.build_opener(_NoRedirection)


def _reason(error: Exception) -> str:
    """What went wrong, without the URL that some errors quote."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError | socket.timeout):
        return "the connection timed out"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    if isinstance(inner, ConnectionError):
        return "the receiver closed the connection without an answer"
    if isinstance(inner, http.client.InvalidURL | ValueError):
        return "the URL cannot be used"
    if isinstance(inner, http.client.HTTPException):
        return "the answer is not valid HTTP"
    return "the connection failed"


class DeliveryFailed(Exception):
    """The receiver did not accept a message. The text contains no part of its URL."""


class Channel(Protocol):
    """A way to send messages, such as a webhook."""

    def send(self, message: Message) -> None:
        """Returns when the receiver has accepted the message. The text of an error is shown, so it contains no
        secret."""
        ...


class Attempt:
    """Begins at once. `problem` is None when the message was accepted."""

    def __init__(
        self,
        message: Message,
        channel: Channel,
        *,
        timeout_s: float,
        when_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.message, self._channel, self._when_done = message, channel, when_done
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._done = threading.Event()
        self._problem: str | None = None
        threading.Thread(target=self._send, name=f"alert to {message.receiver}", daemon=True).start()

    @property
    def returned(self) -> bool:
        return self._done.is_set()

    @property
    def over(self) -> bool:
        """Whether the outcome is known: the channel has returned, or its time is up."""
        return self.returned or time.monotonic() >= self._deadline

    @property
    def problem(self) -> str | None:
        return self._problem if self.returned else f"no answer within {self._timeout_s:g} s"

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the end of the attempt, at most so many seconds."""
        left = max(0.0, self._deadline - time.monotonic())
        self._done.wait(left if seconds is None else min(seconds, left))

    def _send(self) -> None:
        try:
            self._channel.send(self.message)
        except (DeliveryFailed, SerinError) as error:
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001 (a library behind a channel may raise anything)
            self._problem = f"{type(error).__name__}: {error}"
        self._done.set()
        self._when_done()
