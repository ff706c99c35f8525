"""The order of rows: one shuffle of everything per epoch, split over ranks without overlap, resumable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serin.errors import BundleBroken
from serin.formats.shards import SplitArrays
from serin.training.data.loader import Loader, one_core_thread
from serin.training.data.stream import BLOCK_ROWS, StreamLoader
from serin.training.data.tables import MappedTable, ResidentTable, open_table

CPU = torch.device("cpu")
ROWS = 1003


def split(parts: tuple[int, ...] = (500, 500, 3)) -> SplitArrays:
    ids = [np.arange(sum(parts[:number]), sum(parts[: number + 1])) for number in range(len(parts))]
    return SplitArrays(
        num=tuple(np.stack([part, -part], axis=1).astype(np.float32) for part in ids),
        cat=tuple((part % 5).astype(np.int32)[:, None] for part in ids),
        target=tuple((part % 2).astype(np.float32) for part in ids),
        rows=tuple(ids),
    )


def loader(*, rank: int = 0, ranks: int = 1, seed: int = 7) -> Loader:
    return Loader(ResidentTable(split(), CPU), batch_rows=100, seed=seed, rank=rank, ranks=ranks)


def stream(parts: tuple[int, ...] = (9000, 9000, 2500), *, rank: int = 0, ranks: int = 1) -> StreamLoader:
    """Chunks of some 5,000 rows: several to an epoch, and blocks that lie in two of them, and in two parts."""
    table = MappedTable(split(parts), CPU)
    return StreamLoader(
        table, batch_rows=100, seed=7, rank=rank, ranks=ranks, chunk_bytes=5000 * table.row_bytes // ranks
    )


def ids(source: StreamLoader, start: int, stop: int) -> list[int]:
    return [int(row) for batch in source.batches(start, stop) for row in batch.num[:, 0].tolist()]


def rows_of_epoch(source: Loader, epoch: int) -> list[int]:
    steps = range(epoch * source.steps_per_epoch, (epoch + 1) * source.steps_per_epoch)
    return [row for step in steps for row in source.rows_of(step).tolist()]


def test_an_epoch_takes_each_row_at_most_once_and_leaves_out_less_than_a_batch() -> None:
    rows = rows_of_epoch(loader(), 0)
    assert len(rows) == len(set(rows)) == 1000


def test_ranks_share_each_batch_without_overlap() -> None:
    whole = rows_of_epoch(loader(), 1)
    pieces = [loader(rank=rank, ranks=4) for rank in range(4)]
    for step in range(10, 20):
        together = [row for piece in pieces for row in piece.rows_of(step).tolist()]
        assert together == whole[(step - 10) * 100 : (step - 9) * 100]


def test_every_epoch_has_its_own_order_and_the_seed_decides_it() -> None:
    assert rows_of_epoch(loader(), 0) != rows_of_epoch(loader(), 1)
    assert rows_of_epoch(loader(), 1) == rows_of_epoch(loader(), 1)
    assert rows_of_epoch(loader(), 1) != rows_of_epoch(loader(seed=8), 1)


def test_a_run_resumed_at_any_step_gets_the_batches_it_would_have_got() -> None:
    through = [batch.num for batch in loader().batches(0, 25)]
    resumed = [batch.num for batch in loader().batches(13, 25)]
    assert all(torch.equal(a, b) for a, b in zip(through[13:], resumed, strict=True))


def test_row_numbers_are_those_of_the_batches() -> None:
    source = loader()
    for rows, batch in zip(source.row_numbers(5, 15), source.batches(5, 15), strict=True):
        assert torch.equal(source.take(rows).num, batch.num)


def test_a_streamed_epoch_takes_each_row_at_most_once_and_leaves_out_less_than_a_batch() -> None:
    for epoch in (0, 1):
        rows = ids(stream(), epoch * 205, (epoch + 1) * 205)
        assert len(rows) == len(set(rows)) == 20_500


def test_a_stream_shuffles_blocks_and_rows_differently_each_epoch() -> None:
    first, second = ids(stream(), 0, 205), ids(stream(), 205, 410)
    assert first != second
    assert sorted(first) == sorted(second)
    in_first_batch = {row // BLOCK_ROWS for row in first[:100]}
    assert len(in_first_batch) >= 2  # a batch of neighbours would hold one block
    assert first[:100] != sorted(first[:100])


def test_a_stream_resumed_at_any_step_gives_the_batches_it_would_have_given() -> None:
    assert ids(stream(), 0, 410)[277 * 100 :] == ids(stream(), 277, 410)
    assert ids(stream(), 5, 5) == []


def test_ranks_stream_their_own_rows_without_overlap() -> None:
    pieces = [ids(stream(rank=rank, ranks=2), 0, 205) for rank in range(2)]
    assert len(pieces[0]) == len(pieces[1]) == 10_250
    assert not set(pieces[0]) & set(pieces[1])


def test_the_columns_of_a_streamed_batch_belong_to_the_same_rows() -> None:
    for batch in stream().batches(0, 60):
        assert batch.cat.dtype == torch.int64
        assert torch.equal(batch.cat[:, 0], batch.num[:, 0].long() % 5)
        assert torch.equal(batch.target, batch.num[:, 0] % 2)


def test_a_mapped_table_is_cut_as_a_resident_one_is() -> None:
    mapped, resident = MappedTable(split(), CPU), ResidentTable(split(), CPU)
    for start, stop in ((0, 10), (495, 1003), (500, 501)):
        assert torch.equal(mapped.slice(start, stop).num, resident.slice(start, stop).num)
        assert torch.equal(mapped.slice(start, stop).cat, resident.slice(start, stop).cat)


def test_a_table_that_does_not_fit_the_budget_stays_in_its_files() -> None:
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=0), MappedTable)
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=1 << 20), ResidentTable)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_a_code_beyond_its_vocabulary_is_refused_before_training(budget: int) -> None:
    with pytest.raises(BundleBroken, match="has codes 0 to 4"):
        open_table(split(), CPU, sizes=(4,), budget=budget)


def test_a_thread_beside_the_training_uses_one_core_and_leaves_the_others_to_it() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_core_thread("beside") as thread:
            thread.submit(torch.randperm, 100_000).result()
            assert thread.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
