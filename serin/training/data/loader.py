"""Column batches of a resident split, never a row at a time. (stream.py loads splits that do not fit into memory.)

The order of rows is one permutation of the whole split per epoch, made from (seed, epoch) alone: the same on every
device, for any number of ranks and at whatever step a run is resumed. Every step takes the next `batch_rows` of it, and
every rank its own slice of them. Rows that do not fill a last step are left out of that epoch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from serin.training.data.tables import Batch, ResidentTable


class Loader:
    """The batches of a whole run for one rank, from any step on."""

    def __init__(
        self, table: ResidentTable, *, batch_rows: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._table = table
        self._batch_rows = batch_rows
        self._piece = batch_rows // ranks
        self._rank = rank
        self._orders = _Orders(table.rows, seed, table.device)
        self.rows = table.rows
        self.steps_per_epoch = table.rows // batch_rows
        self.wait_s = 0.0  # total time that steps waited for their rows

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yields the batches of the steps from `start` up to `stop`, counted over all epochs."""
        for step in range(start, stop):
            clock = time.perf_counter()
            batch = self.take(self.rows_of(step))
            if not self._table.on_gpu:  # on a GPU the gathers are only queued, nothing waits for them
                self.wait_s += time.perf_counter() - clock
            yield batch

    def row_numbers(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields row numbers instead, for a step that gathers its rows itself with `take`."""
        return (self.rows_of(step) for step in range(start, stop))

    def take(self, rows: Tensor) -> Batch:
        return self._table.take(rows)

    def rows_of(self, step: int) -> Tensor:
        """Returns the rows that this rank takes at a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        begin = position * self._batch_rows + self._rank * self._piece
        return self._orders.of(epoch)[begin : begin + self._piece]

    def rows_of_many(self, step: int, count: int) -> Tensor:
        """Returns the rows of `count` steps, which must be in one epoch: [count, rows]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        begin, end = position * self._batch_rows, (position + count) * self._batch_rows
        all_ranks = self._orders.of(epoch)[begin:end].view(count, -1, self._piece)
        return all_ranks[:, self._rank]


class _Orders:
    """The permutation of each epoch; the next one is made in a thread while this one is used."""

    def __init__(self, rows: int, seed: int, device: torch.device) -> None:
        self._rows = rows
        self._seed = seed
        self._device = device
        self._thread = one_core_thread("row-order")
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


def one_core_thread(name: str) -> ThreadPoolExecutor:
    """Returns a thread whose torch operators use one core.

    One that ran on several would start its own team of OpenMP threads. With more threads than cores OpenMP no longer
    spins between operators but sleeps, in the training's own team too: on two cores its operators took three times as
    long.
    """
    pool, threads = ThreadPoolExecutor(1, name), torch.get_num_threads()
    pool.submit(_use_one_core).result()
    torch.set_num_threads(threads)  # torch also keeps a number for all threads
    return pool


def _use_one_core() -> None:
    torch.get_num_threads()  # a thread takes over the number for all when torch is first asked for it
    torch.set_num_threads(1)


def stream_seed(*words: object) -> int:
    """Returns an independent 63-bit seed for each random stream."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
