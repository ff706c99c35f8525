"""Sends one event to the stack's Prefect server, in a thread that no duty waits for: the server may hang."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from serin.errors import SerinError
from serin.stack.host.state import Stack
from serin.stack.prefect import rest_api
from serin.stack.prefect.login import stack_api


class EventRequest:
    """Begins at once. `over`: the server has answered or could not be asked; `problem` is None when it accepted."""

    def __init__(
        self, stack: Stack, name: str, *, model: str, payload: Mapping[str, Any], now: float
    ) -> None:
        self.t = now
        self._event = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.fromtimestamp(now, UTC).isoformat(),
            "event": name,
            "resource": {
                "prefect.resource.id": f"serin.model.{model}",
                "prefect.resource.name": model,
                "serin.model": model,
            },
            "payload": dict(payload),
        }
        self.problem: str | None = None
        self._stack = stack
        self._thread = threading.Thread(target=self._send, name=f"event about {model}", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _send(self) -> None:
        try:
            rest_api.call(stack_api(self._stack), "POST", "/events", [self._event])
        except (SerinError, OSError, ValueError) as error:
            self.problem = str(error)
