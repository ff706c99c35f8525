"""The order of rows: one shuffle of everything per epoch, split over ranks without overlap, resumable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serin.errors import BundleBroken
from serin.formats.shards import SplitArrays
from serin.training.loader import Loader, MappedTable, ResidentTable, Table, open_table

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


def loader(table: Table | None = None, *, rank: int = 0, ranks: int = 1, seed: int = 7) -> Loader:
    rows = table or ResidentTable(split(), CPU)
    return Loader(rows, batch_rows=100, seed=seed, rank=rank, ranks=ranks, device=CPU)


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


@pytest.mark.parametrize("kind", [ResidentTable, MappedTable])
def test_a_run_taken_up_at_any_step_gets_the_batches_it_would_have_got(kind: type) -> None:
    table = kind(split(), CPU)
    through = [batch.num for batch in loader(table).batches(0, 25)]
    resumed = [batch.num for batch in loader(table).batches(13, 25)]
    assert all(torch.equal(a, b) for a, b in zip(through[13:], resumed, strict=True))


def test_a_mapped_table_gives_the_batches_of_a_resident_one() -> None:
    pairs = zip(
        loader(ResidentTable(split(), CPU)).batches(0, 12),
        loader(MappedTable(split(), CPU)).batches(0, 12),
        strict=True,
    )
    for resident, mapped in pairs:
        assert torch.equal(resident.num, mapped.num)
        assert torch.equal(resident.cat, mapped.cat)
        assert torch.equal(resident.target, mapped.target)
        assert mapped.cat.dtype == torch.int64


def test_the_columns_of_a_batch_belong_to_the_same_rows() -> None:
    for batch in loader(MappedTable(split(), CPU)).batches(0, 3):
        assert torch.equal(batch.cat[:, 0], batch.num[:, 0].long() % 5)
        assert torch.equal(batch.target, batch.num[:, 0] % 2)


def test_a_table_that_does_not_fit_the_budget_stays_in_its_files() -> None:
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=0), MappedTable)
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=1 << 20), ResidentTable)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_a_code_beyond_its_vocabulary_is_refused_before_training(budget: int) -> None:
    with pytest.raises(BundleBroken, match="holds codes 0 to 4"):
        open_table(split(), CPU, sizes=(4,), budget=budget)
