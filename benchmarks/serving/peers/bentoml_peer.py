"""BentoML: a worker per core, an asynchronous API. Its adaptive batching is slower than none for a model this small."""

from __future__ import annotations

import os
from typing import Any

import bentoml

from benchmarks.serving.peers.graph import Graph


@bentoml.service(
    workers=int(os.environ.get("BENCH_WORKERS", "1")),
    traffic={"timeout": 30},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Scorer:
    def __init__(self) -> None:
        self.graph = Graph()

    @bentoml.api(route="/score")
    async def score(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {"score": self.graph.score(columns)}
