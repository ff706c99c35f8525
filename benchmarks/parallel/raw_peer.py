"""A hand-written loop for torchrun: DistributedDataParallel, a permutation per epoch, a slice for every rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parallel.ranks import lap as lap_of_all
from benchmarks.training.networks import Network, finish
from benchmarks.training.table import read_table
from serin.training.parallel.ranks import Ranks

_tables: dict[str, tuple[torch.Tensor, ...]] = {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    return lap_of_all("benchmarks.parallel.raw_peer", request)


def lap(request: dict[str, Any], world: Ranks) -> dict[str, Any]:
    on = world.device
    torch.set_float32_matmul_precision("high" if request["precision"] == "tf32" else "highest")
    torch.set_num_threads(request["threads"])
    if request["table"] not in _tables:
        _tables[request["table"]] = tuple(
            torch.from_numpy(array).to(on) for array in read_table(request["table"])
        )
    num, cat, target = _tables[request["table"]]
    torch.manual_seed(1)
    network = DistributedDataParallel(Network(request["kind"], request["hidden"]).to(on))
    optimizer = torch.optim.AdamW(network.parameters(), lr=request["rate"], weight_decay=1e-5, fused=True)
    rows, share = request["batch_rows"], request["batch_rows"] // world.size
    losses: list[torch.Tensor] = []
    finish(on)
    dist.barrier()
    began = time.perf_counter()
    for epoch in range(request["epochs"]):
        order = torch.randperm(len(target), generator=torch.Generator().manual_seed(epoch)).to(on)
        losses = []
        for start in range(0, len(target) - rows + 1, rows):
            index = order[start + world.rank * share : start + (world.rank + 1) * share]
            optimizer.zero_grad(set_to_none=True)
            loss = functional.binary_cross_entropy_with_logits(
                network(num[index], cat[index].long()), target[index]
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return {"loss": float(mean) / world.size, "seconds": time.perf_counter() - began}
