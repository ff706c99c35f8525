"""One attempt to send a message, in a thread that nobody has to wait for: a receiver may hang forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from serin.errors import SerinError
from serin.monitoring.alerts.outbox import Message


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
