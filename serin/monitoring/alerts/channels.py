"""The channels that alerts are sent through: a log line, a webhook, and apprise for mail, chat and telephone."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, Final, Protocol

from serin.errors import ExtraMissing, ReceiverRefused, SerinError
from serin.monitoring.alerts.outbox import Message
from serin.monitoring.alerts.receivers import Receiver

log = logging.getLogger("serin.alerts")

_SOCKET_S: Final = 10.0
_SEVERITY: Final = {"page": "failure", "ticket": "warning", "info": "info"}  # apprise's words


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
        "resolved": record.resolved if message.event == "resolved" else None,
    }


class LogChannel:
    """One line in the log of the process that sends."""

    def send(self, message: Message) -> None:
        alert = message.record.alert
        if message.event == "fired":
            log.warning("%s", _one_line(f"ALERT {alert.severity} {alert.key}: {alert.title}. {alert.text}"))
        else:
            log.info("%s", _one_line(f"{message.record.ended} {alert.key}: {alert.title}"))


def _one_line(text: str) -> str:
    """Values that clients sent may be part of a text: they must not begin another line of the log."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


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
        title = named if message.event == "fired" else f"Resolved: {named}"
        about = f"model {alert.model}, release {alert.release}, " if alert.model else ""
        text = f"{alert.text}\n\n{about}alert {alert.key}"
        kind = _SEVERITY[alert.severity] if message.event == "fired" else "success"
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
