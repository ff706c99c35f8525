"""Clients for the demo: rows sent one by one at a steady rate over several connections, and their outcomes."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from serin.serving.client.address import Address
from serin.serving.tuning.load import LoadResult, Open, http_request, run_load
from serin.serving.tuning.load_connections import Target

REQUESTS_PER_S = 100
LONGEST_S = 24 * 3600.0


@dataclass
class Traffic:
    """Sends requests during the block `with Traffic(...) as traffic:`; the figures are available after it."""

    address: str
    model: str
    bodies: list[list[dict[str, Any]]]  # the "inputs" of each request
    result: LoadResult | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def answered(self) -> int:
        return len(self.result.latencies) if self.result else 0

    @property
    def failures(self) -> dict[str, int]:
        """Counts the failures by kind."""
        return self.result.errors if self.result else {"the clients themselves": 1}

    def __enter__(self) -> Traffic:
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)

    def _ask(self) -> None:
        address, kind = Address.parse(self.address), {"content-type": "application/json"}
        path, bodies = f"/v2/models/{self.model}/infer", [{"inputs": inputs} for inputs in self.bodies]
        requests = tuple(http_request(address, path, json.dumps(body).encode(), kind) for body in bodies)
        target = Target(address=address, requests=requests, timeout_s=10.0)
        pace = Open(requests_per_s=REQUESTS_PER_S, connections=16)
        self.result = run_load(target, pace, seconds=LONGEST_S, stop=self._stop.is_set)
