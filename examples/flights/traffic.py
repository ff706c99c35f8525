"""Clients for the demo: rows sent one by one at a steady rate, from several connections, and what became of them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

CONNECTIONS, REQUESTS_PER_S = 4, 100


@dataclass
class Traffic:
    """Runs between `with Traffic(...) as traffic:` and the end of that block."""

    address: str
    model: str
    bodies: list[list[dict[str, Any]]]  # the "inputs" of each request
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        for number in range(CONNECTIONS):
            thread = threading.Thread(target=self._ask, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _ask(self, number: int) -> None:
        requests = [json.dumps({"inputs": inputs}) for inputs in self.bodies[number::CONNECTIONS]]
        connection = http.client.HTTPConnection(self.address, timeout=10)
        count, at = 0, time.monotonic()
        while not self._stop.wait(max(0.0, at - time.monotonic())):
            at = max(at + CONNECTIONS / REQUESTS_PER_S, time.monotonic() - 1.0)
            try:
                connection.request("POST", f"/v2/models/{self.model}/infer", requests[count % len(requests)])
                answer = connection.getresponse()
                answer.read()
                self.answered += 1
                if answer.status != 200:
                    self.failures.append(str(answer.status))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(type(error).__name__)
                connection.close()
            count += 1
        connection.close()
