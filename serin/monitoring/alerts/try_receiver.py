"""Sends a test message to one receiver, outside the alert book."""

from __future__ import annotations

import time
import uuid

from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.attempt import Attempt
from serin.monitoring.alerts.channels import channel_of
from serin.monitoring.alerts.delivery import TIMEOUT_S
from serin.monitoring.alerts.outbox import Message
from serin.monitoring.alerts.receivers import Receiver
from serin.monitoring.alerts.records import AlertRecord


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
