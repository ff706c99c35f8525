"""What a build costs: memory, calls per column, and digests beside the work."""

import cProfile
import os
import pstats
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.column import Column, column_from_arrow
from serin.errors import EngineFailed
from serin.etl import build as building
from serin.etl.binding.layout import lay_out
from serin.etl.build import build_dataset
from serin.etl.engines import attempts
from serin.etl.engines.attempts import Choice
from serin.etl.engines.dask_engine import DaskEngine, WorkersLost
from serin.etl.engines.engine import ProcessEngine
from serin.etl.engines.memory_budget import MIN_ROWS, plan_rows
from serin.etl.engines.pieces import cut_pieces
from serin.etl.engines.spill import Spilled, spill
from serin.etl.sources import find
from serin.etl.sources.files import find_files
from serin.etl.sources.find import Sources
from serin.etl.sources.tables import Read, cut, open_table, read_piece
from serin.formats.dataset import read_dataset
from serin.machine.dask_cluster import local_cluster
from serin.spec.etl import EtlSpec
from serin.store import file_digests
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.logs import heard
from tests.signals import hit
from tests.soak import larger_than_memory
from tests.unit.etl.flights import digest, spec_of
from tests.unit.etl.trips import table_spec


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
    monkeypatch.setattr("serin.etl.engines.engine.spill", note)
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
    reads = (Read(column="n", kind="int"), Read(column="word", kind="string"))
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
    reads = (Read(column="n", kind="int"),)
    assert [each.rows for each in cut_pieces(opened, reads, MIN_ROWS, tmp_path, rows)] == [4 * MIN_ROWS] * 2
    assert len(cut_pieces(opened, reads, MIN_ROWS, tmp_path, 3 * MIN_ROWS)) == 8


def test_a_small_table_in_one_file_is_one_piece_for_each_worker(tmp_path: Path) -> None:
    rows = 5 * 2**16 + 9000
    content = pa.table({"n": np.arange(rows), "y": np.arange(rows) % 2})
    pq.write_table(content, tmp_path / "t.parquet", row_group_size=2**16)
    spec = table_spec(tmp_path / "t.parquet", "y > 0", {"columns": ["n"], "steps": ["normalize"]})
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


FEW, TIMES, ROWS = 60, 4, 300


def calls_by_function(folder: Path, columns: int) -> dict[str, int]:
    """The calls of each function while a table with so many numeric columns is built."""
    folder.mkdir()
    random = np.random.default_rng(3)
    table = pd.DataFrame(
        {f"x{number}": random.standard_normal(ROWS, np.float32) for number in range(columns)}
    )
    table.assign(c=[f"v{n % 7}" for n in range(ROWS)], y=table["x0"] > 0).to_parquet(folder / "t.parquet")
    steps = ["fill_median", "normalize"]
    numbers = {"columns": [f"x{number}" for number in range(columns)], "steps": steps}
    spec = table_spec(folder / "t.parquet", "y", numbers, {"columns": ["c"], "steps": ["categorify"]})
    profile = cProfile.Profile()
    profile.enable()
    build_dataset(spec.data, spec.features, EtlSpec(engine="process"), store=Store(str(folder / "store")))
    profile.disable()
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {f"{Path(file).name}:{line} {name}": calls for (file, line, name), (calls, *_) in found.items()}


def test_four_times_the_columns_are_four_times_the_calls(tmp_path: Path) -> None:
    calls_by_function(tmp_path / "first", FEW)  # reads the libraries
    few, many = (calls_by_function(tmp_path / str(count), count) for count in (FEW, FEW * TIMES))
    assert sum(many.values()) < 1.2 * TIMES * sum(few.values())
    steep = {
        name: (few.get(name, 0), count)
        for name, count in many.items()
        if count > 5000 and count > 1.5 * TIMES * few.get(name, 0)
    }
    assert not steep, "calls that grow faster than the columns"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table that had not changed for a while."""
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 0)
    path = tmp_path / "t.parquet"
    write(path, seed=1)
    return path


def write(path: Path, *, seed: int) -> None:
    draw = np.random.default_rng(seed)
    pq.write_table(pa.table({"a": draw.random(200), "b": draw.integers(0, 2, 200)}), path)


def build(path: Path, store: Store, *, name: str = "t") -> Dataset:
    spec = table_spec(path, "b == 1", {"columns": ["a"], "steps": ["normalize"]})
    return build_dataset(spec.data, spec.features, EtlSpec(), store=store, name=name)


def test_a_dataset_is_the_same_with_digests_before_and_beside(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = build(file, Store(str(tmp_path / "beside")))
    monkeypatch.setattr(building, "find_settled", lambda _: None)
    before = build(file, Store(str(tmp_path / "before")))
    assert beside.digest == before.digest
    sources = [read_dataset(Path(made.path)).sources for made in (beside, before)]
    assert sources[0] == sources[1]
    assert sources[0][0].content.startswith("blake3:")


def test_a_dataset_is_found_again_also_under_another_name(file: Path, store: Store) -> None:
    first = build(file, store)
    for name in ("t", "other"):
        said: list[str] = []
        with heard(said.append):
            assert build(file, store, name=name).path == first.path
        assert any("is there already" in line for line in said)
    write(file, seed=2)  # of the same size
    assert build(file, store, name="third").digest != first.digest


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(compute: Callable[[], Sources]) -> AbstractContextManager[Callable[[], Sources]]:
        write(tmp_path / "new", seed=3)
        (tmp_path / "new").replace(file)  # after the files were found, before their digests
        return find.computed_beside(compute)

    monkeypatch.setattr(building, "computed_beside", replaced)
    said: list[str] = []
    with heard(said.append):
        made = build(file, store)
    assert any("building again" in line for line in said)
    assert made.digest == build(file, Store(str(tmp_path / "other"))).digest


def test_a_file_of_a_moment_ago_is_hashed_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find.find_settled({"t": str(file)}) is not None
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 2 * 10**9)
    write(file, seed=4)
    assert find.find_settled({"t": str(file)}) is None
