"""LitServe with its own batching: waiting requests form one batch."""

# Two methods have no annotations: LitServe builds its route from them, and its documentation has none.
from __future__ import annotations

import os
from typing import Any

import litserve as ls

from benchmarks.serving.peers.graph import Graph


class Scorer(ls.LitAPI):
    def setup(self, device: str) -> None:
        del device
        self.graph = Graph()

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, batch: list[dict[str, Any]]) -> list[list[float]]:
        return self.graph.score_all(batch)

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return {"score": output}


if __name__ == "__main__":
    api = Scorer(max_batch_size=32, batch_timeout=0.001, api_path="/score")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=30, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=int(os.environ["BENCH_WORKERS"]),
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )
