"""Load in the background of a test."""

import threading
from typing import Any

from serin.serving.client.client import Protocol
from serin.serving.tuning.load import Closed, LoadResult, Open, run_load
from tests.e2e.serving_stack import Stack
from tests.kit.load import model_target
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA


class loading:  # noqa: N801 (used as a verb)
    """Load over each protocol, in threads, while the block runs; the results are there after it.

    `clients` ask as fast as they are answered; `requests_per_s` come whatever happens.
    """

    def __init__(
        self,
        stack: Stack,
        protocols: list[Protocol],
        *,
        clients: int = 4,
        requests_per_s: float | None = None,
        **settings: Any,
    ) -> None:
        self._results: list[LoadResult] = []
        rows = bundles.rows(64)
        pace = Open(requests_per_s=requests_per_s) if requests_per_s else Closed(clients=clients)
        self._threads = [
            threading.Thread(
                target=lambda target=target: self._results.append(run_load(target, pace, **settings))
            )
            for target in (
                model_target(stack.url, MODEL, rows, SCHEMA, protocol=protocol) for protocol in protocols
            )
        ]

    def __enter__(self) -> list[LoadResult]:
        for thread in self._threads:
            thread.start()
        return self._results

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join()


def outcome(results: list[LoadResult]) -> str:
    return "; ".join(f"{result.outcomes} at {result.requests_per_s:.0f}/s" for result in results)
