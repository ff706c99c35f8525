"""Memory: pieces are planned from what is free, values go to disk, and a run that has too little goes on with less."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.column import Column, column_from_arrow
from serin.errors import EngineFailed
from serin.etl.engines import attempts
from serin.etl.engines.dask_engine import DaskEngine, WorkersLost, local_cluster
from serin.etl.engines.engine import Choice
from serin.etl.engines.memory_budget import MIN_ROWS, plan_rows
from serin.etl.engines.pieces import cut_pieces
from serin.etl.engines.process_engine import ProcessEngine
from serin.etl.engines.spill import Spilled, spill
from serin.etl.sources.files import find_files
from serin.etl.sources.tables import cut, open_table, read_piece
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from tests.logs import heard
from tests.signals import hit
from tests.soak import larger_than_memory
from tests.unit.etl.flights import digest, spec_of


@pytest.fixture(scope="module")
def expected(few_flights: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path_factory.mktemp("expected"))


def test_a_value_on_disk_comes_back_as_it_was(tmp_path: Path) -> None:
    words = column_from_arrow(pa.array(["b", None, "a", "", "b"]), "string")
    numbers = Column(kind="float", values=np.asarray([1.5, np.nan], np.float32))
    empty = Column(kind="int", values=np.empty(0, np.int64))
    back = spill({"words": words, "numbers": numbers, "empty": empty, "n": 3}, str(tmp_path)).load()
    assert back["words"].to_wire().tolist() == ["b", "", "a", "", "b"]
    assert np.array_equal(back["numbers"].values, numbers.values, equal_nan=True)
    assert len(back["empty"]) == 0
    assert back["n"] == 3
    back["numbers"].values[0] = 7  # private: the file stays as it is


def test_values_held_on_disk_change_nothing_and_are_removed(
    few_flights: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def without_room(*_: Any, **__: Any) -> Choice:
        return Choice(kind="process", workers=2, keep=False, why="a test")

    def note(value: Any, folder: str) -> Spilled:
        held.append(spill(value, folder))
        return held[-1]

    monkeypatch.setattr("serin.etl.engines.attempts.choose_engine", without_room)
    monkeypatch.setattr("serin.etl.engines.process_engine.spill", note)
    assert digest(spec_of(few_flights), EtlSpec(), tmp_path, 4000) == expected
    assert len(held) > 4
    assert not any(Path(value.path).exists() for value in held)


@pytest.mark.parametrize("fails", [1, 4])
def test_when_memory_runs_out_pieces_are_halved_and_it_is_said(
    few_flights: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    calls = iter(range(1, 10**6))
    real = ProcessEngine.collect

    def collect(self: ProcessEngine, *arguments: Any, **named: Any) -> list[Any]:
        if next(calls) <= fails:
            raise MemoryError("no room (a test)")
        return real(self, *arguments, **named)

    monkeypatch.setattr(ProcessEngine, "collect", collect)
    monkeypatch.setattr("serin.etl.engines.attempts.MIN_ROWS", 100)
    said: list[str] = []
    with heard(said.append):
        assert digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path, 8000) == expected
    assert sum("memory ran out" in line for line in said) == fails
    assert any(f"pieces of {8000 >> fails - 1:,} rows" in line for line in said)


def test_what_fits_nowhere_is_refused_with_a_reason(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("none at all")

    monkeypatch.setattr(ProcessEngine, "hold", full)
    with pytest.raises(EngineFailed, match=r"even .* rows at a time are too many"):
        digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path, 9000)
    assert not list(tmp_path.glob("**/dataset.json"))


def test_a_gpu_that_stays_full_gives_way_to_the_host() -> None:
    choice, halvings = Choice(kind="cuda", workers=4, keep=True, why=""), 0
    kinds = []
    for _ in range(3):
        choice, halvings = attempts._smaller(choice, 10**6, halvings, MemoryError())
        kinds.append((choice.kind, halvings, choice.keep))
    assert kinds == [("cuda", 1, False), ("cuda", 2, False), ("process", 0, False)]


def test_a_giant_row_group_is_cut_without_changing_its_rows(tmp_path: Path) -> None:
    rows = 5 * MIN_ROWS + 17
    table = pa.table({"n": range(rows), "word": [f"w{n % 7}" for n in range(rows)], "unused": [0.5] * rows})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows)
    opened = open_table("t", find_files("t", str(tmp_path / "t.parquet")), tmp_path)
    reads = (read_of("n", "int"), read_of("word", "string"))
    pieces = cut_pieces(opened, reads, MIN_ROWS, tmp_path)
    assert [piece.rows for piece in pieces] == [MIN_ROWS] * 5 + [17]
    assert [piece.first_row for piece in pieces] == [MIN_ROWS * n for n in range(6)]
    columns = [read_piece(piece, reads) for piece in pieces]
    assert np.concatenate([each["n"].values for each in columns]).tolist() == list(range(rows))
    assert columns[5]["word"].to_wire()[0] == f"w{5 * MIN_ROWS % 7}"


def test_a_file_is_rewritten_when_a_group_does_not_fit_and_not_for_more_pieces(
    tmp_path: Path,
) -> None:
    rows = 8 * MIN_ROWS
    pq.write_table(pa.table({"n": range(rows)}), tmp_path / "t.parquet", row_group_size=4 * MIN_ROWS)
    opened = open_table("t", find_files("t", str(tmp_path / "t.parquet")), tmp_path)
    reads = (read_of("n", "int"),)
    assert [each.rows for each in cut_pieces(opened, reads, MIN_ROWS, tmp_path, rows)] == [4 * MIN_ROWS] * 2
    assert len(cut_pieces(opened, reads, MIN_ROWS, tmp_path, 3 * MIN_ROWS)) == 8


def test_a_small_table_in_one_file_is_one_piece_for_each_worker(tmp_path: Path) -> None:
    from serin.etl.sources.layout import lay_out

    rows = 5 * 2**16 + 9000
    pq.write_table(
        pa.table({"n": np.arange(rows), "y": np.arange(rows) % 2}),
        tmp_path / "t.parquet",
        row_group_size=2**16,
    )
    spec = load_spec(
        {
            "name": "t",
            "data": {
                "tables": {"t": str(tmp_path / "t.parquet")},
                "target": {"expression": "y > 0", "task": "binary"},
            },
            "features": [{"columns": ["n"], "steps": ["normalize"]}],
        }
    )
    table = open_table("t", find_files("t", str(tmp_path / "t.parquet")), tmp_path)
    layout = lay_out(spec.data, spec.features, {"t": table})
    planned = [
        plan_rows(layout, table, budget_bytes=2**40, workers=workers, least=2**16, most=2**19)
        for workers in (2, 3, 16)
    ]
    assert [[piece.rows for piece in cut(table, each)] for each in planned] == [
        [3 * 2**16, rows - 3 * 2**16],
        [2**17, 2**17, rows - 2**18],
        [2**16] * 5 + [9000],
    ]


def test_a_worker_with_little_room_gets_small_pieces(few_flights: Path, tmp_path: Path) -> None:
    from serin.etl.sources.layout import lay_out

    spec = spec_of(few_flights)
    tables = {
        name: open_table(name, find_files(name, url), tmp_path) for name, url in spec.data.tables.items()
    }
    layout = lay_out(spec.data, spec.features, tables)
    table = tables["flights"]
    sizes = [
        plan_rows(layout, table, budget_bytes=room, workers=1, least=2**16, most=2**19)
        for room in (1, 10_000_000, 2**40)
    ]
    assert sizes[0] == MIN_ROWS
    assert MIN_ROWS < sizes[1] < 2**16
    assert sizes[2] == 2**16


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Any]:
    """Whatever Dask is told otherwise, it does not give up workers that died: how fast they are back is chance."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}),
        local_cluster(2, 400_000_000, closed=False) as client,
    ):
        yield client


def test_a_worker_killed_in_the_middle_changes_nothing(
    few_flights: Path, expected: str, tmp_path: Path, two_workers: Any
) -> None:
    pids = dict(two_workers.run(os.getpid))
    real, killed = DaskEngine.reduce, threading.Event()

    def kill_during(*_: Any) -> None:
        killed.set()
        hit(next(iter(pids.values())))

    with pytest.MonkeyPatch.context() as patch:

        def reduce(self: DaskEngine, *arguments: Any) -> Any:
            if not killed.is_set():
                kill_during()
            return real(self, *arguments)

        patch.setattr(DaskEngine, "reduce", reduce)
        etl = EtlSpec(engine=two_workers.scheduler.address)
        assert digest(spec_of(few_flights), etl, tmp_path, 3000) == expected
    assert killed.is_set()


def test_workers_with_less_memory_than_the_table_has_run_through(tmp_path: Path, two_workers: Any) -> None:
    """A small version of tests/soak: pieces go to disk, a join comes in parts, and no worker comes near its limit."""
    spec, _ = larger_than_memory.write_table(tmp_path / "table", 80_000)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "one")
    said: list[str] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        larger_than_memory.watched(two_workers) as largest,
    ):
        patch.setattr("serin.etl.engines.dask_engine.memory_bytes", lambda _: 1)  # as if there were more rows
        patch.setattr("serin.etl.engines.dask_engine._WORKER_SHARE", 0.05)
        patch.setattr("serin.etl.relational.prepare.shared_budget", lambda _: 1_500_000)
        etl = EtlSpec(engine=two_workers.scheduler.address)
        with heard(said.append):
            assert digest(spec, etl, tmp_path / "two") == expected
    assert any(line.startswith("places is joined in ") for line in said)
    print("largest worker", max(largest.values()))
    assert max(largest.values()) < 380_000_000


def test_a_piece_that_ends_every_worker_is_too_large(two_workers: Any, tmp_path: Path) -> None:
    engine = DaskEngine(two_workers, scratch=tmp_path)
    assert 10_000_000 < engine.budget_bytes < 100_000_000
    with pytest.raises(WorkersLost):
        engine.collect(os._exit, [two_workers.submit(int, 1, pure=False)])


def read_of(column: str, kind: Any) -> Any:
    from serin.etl.sources.partitions import Read

    return Read(column=column, kind=kind)
