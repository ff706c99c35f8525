"""A hand-written loop: the table in memory, shuffled by a permutation, fused AdamW, eager steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from benchmarks.clock import Watch
from benchmarks.training.networks import Network, device, finish
from benchmarks.training.table import read_table

_tables: dict[str, tuple[torch.Tensor, ...]] = {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    on = device()
    torch.set_float32_matmul_precision("high" if request["precision"] == "tf32" else "highest")
    if request["table"] not in _tables:
        _tables[request["table"]] = tuple(
            torch.from_numpy(array).to(on) for array in read_table(request["table"])
        )
    num, cat, target = _tables[request["table"]]
    torch.manual_seed(1)
    network = Network(request["kind"], request["hidden"]).to(on)
    optimizer = torch.optim.AdamW(network.parameters(), lr=request["rate"], weight_decay=1e-5, fused=True)
    rows, losses = request["batch_rows"], []
    finish(on)
    watch = Watch()
    for _ in range(request["epochs"]):
        order = torch.randperm(len(target), device=on)
        losses = []
        for start in range(0, len(target) - rows + 1, rows):
            index = order[start : start + rows]
            optimizer.zero_grad(set_to_none=True)
            loss = functional.binary_cross_entropy_with_logits(
                network(num[index], cat[index].long()), target[index]
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    mean = float(torch.stack(losses).mean())
    return {**watch.read(), "loss": mean}
