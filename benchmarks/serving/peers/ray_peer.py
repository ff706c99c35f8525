"""Ray Serve: a replica per core, without a copy of the columns in between."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.serving.peers.graph import Graph


@serve.deployment(
    num_replicas=int(os.environ["BENCH_WORKERS"]),
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 0.5},
)
class Scorer:
    def __init__(self) -> None:
        self.graph = Graph()

    async def __call__(self, request: Request) -> dict[str, Any]:
        return {"score": self.graph.score(await request.json())}


if __name__ == "__main__":
    names = ("BENCH_MODEL", "BENCH_THREADS", "BENCH_WORKERS", "PYTHONPATH")
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {name: os.environ[name] for name in names}},
        object_store_memory=200_000_000,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"])})
    serve.run(Scorer.bind(), route_prefix="/score")  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray's processes end with this one
    signal.pause()
