"""An alert: what somebody should know about a model now, and when it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["objective", "drift", "quality", "data", "capture", "retrain", "rollout", "process"]
Severity = Literal["page", "ticket", "info"]
"""`page`: somebody must look now; `ticket`: on the next working day; `info`: nothing must be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`key` identifies what it is about, such as `flights/drift/carrier`: a second alert with the same key continues
    the first one. `model`: empty for an alert about the whole stack. `facts`: numbers and names for machines,
    JSON-able. `since`: when it began, which may be long before it was noticed."""

    key: str
    kind: Kind
    model: str
    release: str
    severity: Severity
    title: str
    text: str
    since: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class Alerts(Protocol):
    """Where duties report. Both calls may be repeated; neither waits for a delivery."""

    def fire(self, alert: Alert, now: float) -> None: ...

    def resolve(self, key: str, now: float, *, closed: str = "") -> None:
        """Ends an alert. Nothing happens when none with this key is open. `closed`: why it ends although nobody knows
        whether what it reported is over."""
        ...
