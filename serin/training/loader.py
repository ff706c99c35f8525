"""Column batches of a split: never a row at a time.

The order of rows is one permutation of the whole split per epoch, made from (seed, epoch) alone: the same on every
device, for any number of ranks and at whatever step a run is taken up again. Every step takes the next `batch_rows` of
it and every rank its own piece of them. Rows that do not fill a last step are left out of that epoch.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from serin.errors import BundleBroken
from serin.formats.shards import Array, SplitArrays

_SHARE_OF_GPU = 0.6  # of what is free there, for resident tables; the rest is for the network and its step
_SHARE_OF_HOST = 0.4
_AHEAD = 2  # batches that are fetched while a step runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """num float32[n, k], cat int64[n, m], target float32[n], on the device of the step."""

    num: Tensor
    cat: Tensor
    target: Tensor


class Table(Protocol):
    """A split that can be cut along any list of rows."""

    rows: int
    on_gpu: bool
    mapped: bool  # its batches are worth fetching ahead

    def take(self, index: Tensor) -> Batch: ...
    def slice(self, start: int, stop: int) -> Batch: ...


def open_table(
    split: SplitArrays, device: torch.device, *, sizes: Sequence[int], budget: int | None = None
) -> Table:
    """Resident on the device when it fits into `budget` bytes (default: a share of what is free), else mapped."""
    allowed = _free_bytes(device) if budget is None else budget
    needed = sum(part.nbytes for parts in (split.num, split.cat, split.target) for part in parts)
    table = ResidentTable(split, device) if needed <= allowed else MappedTable(split, device)
    table.check_codes(sizes)
    return table


class ResidentTable:
    """The whole split in the memory of the device: a batch is three gathers there, without the host."""

    mapped = False

    def __init__(self, split: SplitArrays, device: torch.device) -> None:
        self.rows = len(split)
        self.on_gpu = device.type != "cpu"
        self._device = device
        self._num = _copy(split.num, device)
        self._cat = _copy(split.cat, device)
        self._target = _copy(split.target, device)

    def check_codes(self, sizes: Sequence[int]) -> None:
        if sizes and self.rows:
            _refuse_codes(self._cat.amin(0).tolist(), self._cat.amax(0).tolist(), sizes)

    def take(self, index: Tensor) -> Batch:
        rows = index.to(self._device)
        return Batch(num=self._num[rows], cat=self._cat[rows].long(), target=self._target[rows])

    def slice(self, start: int, stop: int) -> Batch:
        return Batch(
            num=self._num[start:stop], cat=self._cat[start:stop].long(), target=self._target[start:stop]
        )


class MappedTable:
    """The split left in its files: batches are gathered on the host and sent to the device."""

    on_gpu = False
    mapped = True

    def __init__(self, split: SplitArrays, device: torch.device) -> None:
        self.rows = len(split)
        self._split = split
        self._device = device
        self._starts = np.cumsum([0, *(len(part) for part in split.rows)])

    def check_codes(self, sizes: Sequence[int]) -> None:
        for part in self._split.cat if sizes else ():
            _refuse_codes(part.min(axis=0).tolist(), part.max(axis=0).tolist(), sizes)

    def take(self, index: Tensor) -> Batch:
        return self._gather(index.numpy())

    def slice(self, start: int, stop: int) -> Batch:
        return self._gather(np.arange(start, stop))

    def _gather(self, rows: Array) -> Batch:
        part_of = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(part_of, kind="stable")
        counts = np.bincount(part_of, minlength=len(self._split.rows))
        places = np.split(order, np.cumsum(counts)[:-1])
        arrays = []
        for parts in (self._split.num, self._split.cat, self._split.target):
            gathered = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
            for number, place in enumerate(places):
                if len(place):
                    gathered[place] = parts[number][rows[place] - self._starts[number]]
            arrays.append(torch.from_numpy(gathered))
        num, cat, target = (self._send(array) for array in arrays)
        return Batch(num=num, cat=cat.long(), target=target)

    def _send(self, array: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return array
        with torch.cuda.device(self._device):  # a fetching thread would pin by way of the first GPU
            return array.pin_memory().to(self._device, non_blocking=True)


class Loader:
    """The batches of a whole run for one rank, from any step on."""

    def __init__(
        self, table: Table, *, batch_rows: int, seed: int, rank: int = 0, ranks: int = 1, device: torch.device
    ) -> None:
        self._table = table
        self._batch_rows = batch_rows
        self._piece = batch_rows // ranks
        self._rank = rank
        self._orders = _Orders(table.rows, seed, device if table.on_gpu else torch.device("cpu"))
        self.rows = table.rows
        self.steps_per_epoch = table.rows // batch_rows
        self.wait_s = 0.0  # in which a step waited for its rows

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """For the steps from `start` up to `stop`, counted over all epochs."""
        return self._ahead(start, stop) if self._table.mapped else self._at_once(start, stop)

    def _at_once(self, start: int, stop: int) -> Iterator[Batch]:
        for step in range(start, stop):
            clock = time.perf_counter()
            batch = self._take(step)
            if not self._table.on_gpu:  # there the gathers are only queued, nothing waits for them
                self.wait_s += time.perf_counter() - clock
            yield batch

    def _ahead(self, start: int, stop: int) -> Iterator[Batch]:
        with ThreadPoolExecutor(1, "fetch-ahead") as thread:
            fetched = deque(
                thread.submit(self._take, step) for step in range(start, min(start + _AHEAD, stop))
            )
            for step in range(start, stop):
                clock = time.perf_counter()
                batch = fetched.popleft().result()
                self.wait_s += time.perf_counter() - clock
                if step + _AHEAD < stop:
                    fetched.append(thread.submit(self._take, step + _AHEAD))
                yield batch

    def rows_of(self, step: int) -> Tensor:
        """Which rows this rank takes at a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        begin = position * self._batch_rows + self._rank * self._piece
        return self._orders.of(epoch)[begin : begin + self._piece]

    def _take(self, step: int) -> Batch:
        return self._table.take(self.rows_of(step))


class _Orders:
    """Each epoch's permutation; the next one is made in a thread while this one is used."""

    def __init__(self, rows: int, seed: int, device: torch.device) -> None:
        self._rows = rows
        self._seed = seed
        self._device = device
        self._thread = ThreadPoolExecutor(1, "row-order")
        self._made: dict[int, Future[Tensor]] = {}

    def of(self, epoch: int) -> Tensor:
        if epoch not in self._made or epoch + 1 not in self._made:
            kept = {number: order for number, order in self._made.items() if number in (epoch, epoch + 1)}
            for number in (epoch, epoch + 1):
                if number not in kept:
                    kept[number] = self._thread.submit(self._make, number)
            self._made = kept
        return self._made[epoch].result()

    def _make(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(stream_seed(self._seed, "order", epoch))
        return torch.randperm(self._rows, generator=generator).to(self._device)


def stream_seed(*words: object) -> int:
    """A 63-bit seed of its own for everything that is random."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _copy(parts: Sequence[Array], device: torch.device) -> Tensor:
    rows = sum(len(part) for part in parts)
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    whole = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=device)
    start = 0
    for part in parts:
        # Mapped files are read-only, which torch does not know: copied on the host first, then sent.
        whole[start : start + len(part)] = torch.from_numpy(np.array(part))
        start += len(part)
    return whole


def _refuse_codes(lowest: Sequence[int], highest: Sequence[int], sizes: Sequence[int]) -> None:
    """A code beyond its table would train another column's numbers, or end the process on a GPU."""
    for column, (low, high, size) in enumerate(zip(lowest, highest, sizes, strict=True)):
        if low < 0 or high >= size:
            reason = (
                f"categorical column {column} holds codes {low} to {high}, dataset.json says 0 to {size - 1}"
            )
            raise BundleBroken(path="cat.i32", reason=reason)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU)
    return int(psutil.virtual_memory().available * _SHARE_OF_HOST)
