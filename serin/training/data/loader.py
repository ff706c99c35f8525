"""Column batches of a split, never a row at a time: of one that is resident, or of its files where it does not fit into
memory.

Of a resident split the order of rows is one permutation of the whole split per epoch, made from (seed, epoch) alone:
the same on every device, for any number of ranks and at whatever step a run is resumed. Every step takes the next
`batch_rows` of it, and every rank its own slice of them. Rows that do not fill a last step are left out of that epoch.

A split that does not fit is loaded chunk by chunk, reading the next one while this one is used. Block shuffle: an epoch
puts blocks of 4,096 neighbouring rows into random order, cuts that order into chunks of some hundred megabytes, and
shuffles the rows within each chunk. Files are read in long runs, and rows that are far apart meet in a batch, though
not any two of them: a table sorted by its target should be shuffled by its ETL. The order depends only on (seed, epoch,
chunk, number of ranks), so a run resumes at any step with the batches it would have had. Each rank reads its own share
of every chunk. On a GPU a chunk goes through pinned memory and a separate stream into one of two buffers there, so that
neither the disk nor the bus delays a step when both are faster than it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serin.training.data.tables import Batch, MappedTable, ResidentTable, gather

BLOCK_ROWS = 4096
_CHUNK_BYTES = 256 * 2**20  # per rank; there are two of them


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """The rows of one chunk on the device, in file order; `order` shuffles them. `arrived`: the event of the completed
    copy."""

    columns: tuple[Tensor, ...]
    order: Tensor
    first_step: int
    steps: int
    arrived: torch.cuda.Event | None


class StreamLoader:
    """The interface of Loader, for a table in its files."""

    def __init__(
        self,
        table: MappedTable,
        *,
        batch_rows: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._table, self._seed, self._rank, self._ranks = table, seed, rank, ranks
        self._batch_rows = batch_rows
        self._piece = batch_rows // ranks
        self.rows = table.rows
        self.steps_per_epoch = table.rows // batch_rows
        self._chunk_steps = max(
            1, min(self.steps_per_epoch, chunk_bytes // (self._piece * max(1, table.row_bytes)))
        )
        self._chunks_per_epoch = -(-self.steps_per_epoch // self._chunk_steps)
        self.wait_s = 0.0
        rows, gpu = self._chunk_steps * self._piece, table.device.type == "cuda"
        self._rooms = [table.empty(rows, device=torch.device("cpu"), pinned=gpu) for _ in range(2)]
        self._places = [table.empty(rows, device=table.device) for _ in range(2)] if gpu else self._rooms
        self._side = torch.cuda.Stream(table.device) if gpu else None  # type: ignore[no-untyped-call]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yields the batches of the steps from `start` up to `stop`, counted over all epochs."""
        if start >= stop:
            return
        first, last = self._chunk_of(start), self._chunk_of(stop - 1)
        with one_core_thread("read-ahead") as thread:
            coming: Future[_Chunk] = thread.submit(self._load, first, None)
            for number in range(first, last + 1):
                clock = time.perf_counter()
                chunk = coming.result()
                self.wait_s += time.perf_counter() - clock
                if number < last:  # its buffer was used by the chunk before this one
                    coming = thread.submit(self._load, number + 1, self._now())
                if chunk.arrived is not None:
                    using = torch.cuda.current_stream(self._table.device)
                    using.wait_event(chunk.arrived)
                    chunk.order.record_stream(using)  # made on the side stream; must not be reused too early
                begin, end = max(start, chunk.first_step), min(stop, chunk.first_step + chunk.steps)
                for step in range(begin, end):
                    at = (step - chunk.first_step) * self._piece
                    num, cat, target = chunk.columns
                    yield gather(num, cat, target, chunk.order[at : at + self._piece])

    def _chunk_of(self, step: int) -> int:
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch * self._chunks_per_epoch + position // self._chunk_steps

    def _now(self) -> torch.cuda.Event | None:
        """Records an event for the work queued on the device so far."""
        if self._side is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._table.device))
        return event

    def _load(self, number: int, free: torch.cuda.Event | None) -> _Chunk:
        epoch, chunk = divmod(number, self._chunks_per_epoch)
        begin = chunk * self._chunk_steps
        steps = min(self._chunk_steps, self.steps_per_epoch - begin)
        rows = steps * self._piece
        room, sent = self._rooms[number % 2], self._sent[number % 2]
        if sent is not None:
            sent.synchronize()  # the bus may still be reading the buffer's old content
        self._read(epoch, begin * self._batch_rows + self._rank * rows, rows, room)
        generator = torch.Generator().manual_seed(
            stream_seed(self._seed, "rows", epoch, chunk, self._ranks, self._rank)
        )
        order = torch.randperm(rows, generator=generator)
        arrived = None
        if self._side is not None:
            order, arrived = self._send(number, rows, order, free)
        return _Chunk(
            columns=self._places[number % 2],
            order=order,
            first_step=epoch * self.steps_per_epoch + begin,
            steps=steps,
            arrived=arrived,
        )

    def _read(self, epoch: int, start: int, rows: int, room: tuple[Tensor, ...]) -> None:
        """Reads `rows` rows of the epoch's order of blocks, from position `start` on."""
        order, starts = self._blocks(epoch)
        block = int(np.searchsorted(starts, start, side="right")) - 1
        done = 0
        while done < rows:
            inside = start + done - int(starts[block])
            count = min(rows - done, int(starts[block + 1] - starts[block]) - inside)
            row = int(order[block]) * BLOCK_ROWS + inside
            self._table.read_into(room, done, row, row + count)
            done, block = done + count, block + 1

    def _blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        count = -(-self.rows // BLOCK_ROWS)
        generator = torch.Generator().manual_seed(stream_seed(self._seed, "blocks", epoch))
        order = torch.randperm(count, generator=generator).numpy()
        sizes = np.minimum(BLOCK_ROWS, self.rows - order * BLOCK_ROWS)
        return order, np.concatenate([[0], np.cumsum(sizes)])

    def _send(
        self, number: int, rows: int, order: Tensor, free: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event]:
        assert self._side is not None
        with torch.cuda.device(self._table.device), torch.cuda.stream(self._side):
            if free is not None:
                self._side.wait_event(free)
            for place, room in zip(self._places[number % 2], self._rooms[number % 2], strict=True):
                place[:rows].copy_(room[:rows], non_blocking=True)
            on_device = order.to(self._table.device)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._side)
        self._sent[number % 2] = arrived
        return on_device, arrived
