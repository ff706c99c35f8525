"""What lies between the host and a GPU: bundles of pieces, the way there and back, and out to files."""

from pathlib import Path

import numpy as np
import pytest

from serin.columns.column import Column, any_true, count_true, tally
from serin.etl.engines.device import HostColumns, OnGpu, gpu_aware, store_rows, take_rescues, to_gpu, to_host
from serin.etl.relational.gpu.batches import gpu_batches
from serin.etl.relational.relation import Related
from serin.etl.sources.tables import Piece
from serin.formats.dataset import SourceFile
from serin.formats.shards import PART_ROWS, Rows, write_rows
from tests.fakes import cupy


def piece(first_row: int, rows: int, file: str = "a") -> Piece:
    source = SourceFile(table="t", path=file, size=1, modified="")
    return Piece(file=source, groups=(0,), first_row=first_row, rows=rows)


def test_pieces_of_several_files_are_bundled_in_order_up_to_the_limit() -> None:
    pieces = [piece(0, 4), piece(4, 4, "b"), piece(8, 3, "c"), piece(11, 20, "d"), piece(31, 1, "d")]
    found = [(each.first_row, each.rows) for each in gpu_batches(pieces, 8)]
    assert found == [(0, 8), (8, 3), (11, 20), (31, 1)]  # a piece is never cut


def test_a_piece_goes_to_a_gpu_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.install(monkeypatch)
    column = Column(kind="int", values=np.asarray([3, 1, 2]))
    there = to_gpu(Related(columns={"a": column}, rows=np.arange(3), dropped={"filtered": 1}))
    assert isinstance(there.rows, cupy.Array)
    assert isinstance(there.columns["a"].values, cupy.Array)
    back = to_host(there)
    assert isinstance(back.columns, HostColumns)  # each comes when it is asked for
    assert back.columns["a"].values.tolist() == [3, 1, 2]
    assert back.rows.tolist() == [0, 1, 2]
    assert back.dropped == {"filtered": 1}


def test_the_host_does_what_a_full_gpu_cannot_and_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.install(monkeypatch)

    @gpu_aware
    def total(related: Related) -> int:
        there = isinstance(related.rows, cupy.Array)
        if there:
            raise MemoryError("full")
        return int(related.rows.sum())

    take_rescues()
    assert OnGpu(total)(to_gpu(Related(columns={}, rows=np.arange(4), dropped={}))) == 6
    assert take_rescues() == 1
    assert take_rescues() == 0


def test_counts_on_a_gpu_are_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cupy.install(monkeypatch)
    codes = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint32)
    weights = codes.astype(np.float64) ** 2
    there = module.asarray(codes)
    assert tally(there, 12).get().tolist() == np.bincount(codes, minlength=12).tolist()
    assert (
        tally(there, 12, module.asarray(weights)).get().tolist() == np.bincount(codes, weights, 12).tolist()
    )
    assert count_true(there == 3) == np.count_nonzero(codes == 3)
    assert any_true(there == 3)
    assert not any_true(there == 11)


@pytest.mark.parametrize("start", [0, PART_ROWS - 7])
def test_rows_leave_a_gpu_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    module = cupy.install(monkeypatch)
    monkeypatch.setattr("serin.etl.engines.device._STAGE_BYTES", 64)  # several copies for each file
    random = np.random.default_rng(1)
    rows = Rows(
        num=random.normal(size=(50, 3)).astype(np.float32),
        cat=random.integers(0, 9, (50, 0)).astype(np.int32),
        target=random.random(50).astype(np.float32),
        rows=np.arange(50),
    )
    there = Rows(**{name: module.asarray(getattr(rows, name)) for name in ("num", "cat", "target", "rows")})
    write_rows(tmp_path / "host", start, rows)
    store_rows([(tmp_path / "gpu", start, there)])
    files = sorted(path.relative_to(tmp_path / "host") for path in (tmp_path / "host").rglob("*.*"))
    assert len(files) == (8 if start else 4)
    for file in files:
        assert (tmp_path / "gpu" / file).read_bytes() == (tmp_path / "host" / file).read_bytes()
