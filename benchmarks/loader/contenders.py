"""Contenders of the loader benchmark: one shuffled epoch as batches of tensors, on the GPU where there is one.

Serin, torch's DataLoader in its two usual forms, and index_select alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.clock import Watch
from benchmarks.training.networks import device, finish
from benchmarks.training.table import NUMERIC, read_table
from serin.formats.shards import SplitArrays
from serin.training.data.loader import Loader
from serin.training.data.tables import ResidentTable

Columns = tuple[Tensor, Tensor, Tensor]
_made: dict[str, Any] = {}
_TRIED_EPOCHS = 9


class Batches(TensorDataset):
    """A torch dataset that is indexed by lists of rows."""

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[rows] for tensor in self.tensors)


def ours(request: dict[str, Any]) -> Iterator[Columns]:
    if "ours" not in _made:
        num, cat, target = read_table(request["table"])
        split = SplitArrays(num=(num,), cat=(cat,), target=(target,), rows=(target.astype("int64"),))
        table = ResidentTable(split, device())
        _made["ours"] = Loader(table, batch_rows=request["batch_rows"], seed=1)
    loader, begin = _made["ours"], request["epoch"] * _made["ours"].steps_per_epoch
    for batch in loader.batches(begin, begin + loader.steps_per_epoch):
        yield batch.num, batch.cat, batch.target


def limit(request: dict[str, Any]) -> Iterator[Columns]:
    """index_select alone: packed rows, a known order, preallocated output. An allocation per batch is a cost that a
    loader can avoid."""
    packed, order, rows, codes = (_made[name] for name in ("packed", "order", "rows", "codes"))
    for start in range(0, len(packed) - request["batch_rows"] + 1, request["batch_rows"]):
        torch.index_select(packed, 0, order[start : start + request["batch_rows"]], out=rows)
        codes.copy_(rows[:, NUMERIC:-1])
        yield rows[:, :NUMERIC].view(torch.float32), codes, rows[:, -1].view(torch.float32)


def dataloader(request: dict[str, Any]) -> Iterator[Columns]:
    for num, cat, target in DataLoader(
        TensorDataset(*_tensors(request)), batch_size=request["batch_rows"], shuffle=True, drop_last=True
    ):
        yield _sent(num, cat, target)


def batchsampler(request: dict[str, Any]) -> Iterator[Columns]:
    rows = Batches(*_tensors(request))
    sampler = BatchSampler(RandomSampler(rows), request["batch_rows"], drop_last=True)
    for num, cat, target in DataLoader(rows, sampler=sampler, batch_size=None):
        yield _sent(num, cat, target)


def _sent(num: Tensor, cat: Tensor, target: Tensor) -> Columns:
    """Copies the tensors to the GPU where there is one."""
    on = device()
    return num.to(on), cat.to(on).long(), target.to(on)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Reads every batch once, as a step would. A lap has `epochs` epochs; the time is that of one."""
    source = {"ours": ours, "limit": limit, "dataloader": dataloader, "batchsampler": batchsampler}[
        request["who"]
    ]
    rows, ones = 0, torch.zeros((), device=device())
    finish(device())
    watch = Watch()
    for number in range(request["epochs"]):
        for num, cat, target in source({**request, "epoch": request["epoch"] + number}):
            assert cat.dtype == torch.int64
            rows += len(num)
            ones += target.sum()
    finish(device())
    found = {**watch.read(), "rows": rows, "ones": float(ones)}
    return {name: value / request["epochs"] for name, value in found.items()}


def _tensors(request: dict[str, Any]) -> Columns:
    if "tensors" not in _made:
        _made["tensors"] = tuple(torch.from_numpy(array) for array in read_table(request["table"]))
    found: Columns = _made["tensors"]
    return found


def prepare(request: dict[str, Any]) -> None:
    if request["who"] == "ours":
        next(ours(request))
        return
    num, cat, target = _tensors(request)
    if request["who"] == "limit":
        packed = torch.cat([num.view(torch.int32), cat, target[:, None].view(torch.int32)], dim=1)
        _made["packed"], _made["order"] = packed.to(device()), torch.randperm(len(target)).to(device())
        _made["rows"] = _made["packed"][: request["batch_rows"]].clone()
        _made["codes"] = _made["rows"][:, NUMERIC:-1].long()
        torch.set_num_threads(_best_threads(request))


def _best_threads(request: dict[str, Any]) -> int:
    """Returns one thread or all: on a busy machine, threads that wait for each other cost more than they gain."""
    seconds = {}
    for threads in {1, torch.get_num_threads()}:
        torch.set_num_threads(threads)
        seconds[threads] = min(run({**request, "epochs": 1})["seconds"] for _ in range(_TRIED_EPOCHS))
    return min(seconds, key=lambda threads: seconds[threads])
