"""The limit: repeats the same step on one static batch, captured as a CUDA graph on a GPU. It does not learn."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from benchmarks.clock import Watch
from benchmarks.training.networks import Network, device, finish
from benchmarks.training.table import read_table


def run(request: dict[str, Any]) -> dict[str, Any]:
    on = device()
    torch.set_float32_matmul_precision("high" if request["precision"] == "tf32" else "highest")
    rows = request["batch_rows"]
    table = read_table(request["table"])
    num, cat, target = (torch.from_numpy(array[:rows]).to(on) for array in table)
    cat = cat.long()
    network = Network(request["kind"], request["hidden"]).to(on)
    gpu = on.type == "cuda"
    rate = torch.tensor(request["rate"], device=on) if gpu else request["rate"]
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=rate, weight_decay=1e-5, fused=True, capturable=gpu
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.binary_cross_entropy_with_logits(network(num, cat), target).backward()
        optimizer.step()

    again = _captured(step) if gpu else step
    steps = len(table[2]) // rows * request["epochs"]
    finish(on)
    watch = Watch()
    for _ in range(steps):
        again()
    finish(on)
    return dict(watch.read())


def _captured(step: Any) -> Any:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
