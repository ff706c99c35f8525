"""Targets of scheduled scoring: tables of others, two writers at the same time, what cannot be written."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import RowsUnfit, ScoringRefused
from serin.formats.schema import ELEMENTS
from serin.pipeline.score import open_target
from serin.scoring.targets.target import ScoredRun, Target
from serin.store.store import Store
from tests.fakes.live_quality import publish
from tests.kit.score_tables import Delta, Scene, arrived, numbers, score

ROWS = 90


@pytest.fixture
def scene(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    (tmp_path / "database").touch()
    monkeypatch.setenv("TEST_DATABASE", f"sqlite:///{tmp_path}/database")
    publish(Store.open(), 0.0, "{capture: {share: 0}}")
    return Scene(tmp_path)


@pytest.mark.parametrize("kind", ["sql", "delta"])
def test_a_list_of_elements_becomes_columns_of_a_database(scene: Scene, kind: str) -> None:
    target, names = open_target(scene.results[kind].entry), {ELEMENTS: b'["a", "b", "c"]'}
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 3)
    table = pa.table(
        [[0, 1], values], schema=pa.schema([("row", pa.int64()), pa.field("p", values.type, metadata=names)])
    )
    assert target.read_runs() == {}
    run_of(target.folder, 1, table)
    target.commit(1, ScoredRun(release="m-v1", t=1.0, rows=2, files={}))
    found = scene.results[kind].read()
    assert found.num_rows == 2
    if kind == "sql":
        assert found.column_names == ["row", "p_a", "p_b", "p_c"]
        assert found.column("p_b").to_pylist() == [1.0, 4.0]
        clash = table.append_column("p_c", pa.array(["mine", "yours"]))
        run_of(target.folder, 2, clash)
        with pytest.raises(RowsUnfit, match="column 'p_c' has the name of a column of the result"):
            target.commit(2, ScoredRun(release="m-v1", t=2.0, rows=2, files={}))


@pytest.mark.parametrize(
    "kind", [pa.time64("us"), pa.duration("us"), pa.float16(), pa.list_(pa.time64("us"))]
)
def test_types_that_delta_does_not_have_are_named(scene: Scene, kind: pa.DataType) -> None:
    scene.files.add(arrived(0, ROWS).append_column("odd", pa.nulls(ROWS, kind)))
    with pytest.raises(ScoringRefused, match="Delta has no type for odd is "):
        score(scene.files, scene.results["delta"])


def test_a_delta_table_that_a_killed_first_run_has_made_is_continued(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = scene.files, scene.results["delta"]
    rows.add(arrived(0, ROWS))
    write = deltalake.write_deltalake

    def killed(table: Any, *given: Any, **how: Any) -> None:
        if how["mode"] == "append":
            raise KeyboardInterrupt
        write(table, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(deltalake, "write_deltalake", killed)
        with pytest.raises(KeyboardInterrupt):
            score(rows, out)
    assert numbers(out) == []
    assert score(rows, out) is not None
    assert numbers(out) == list(range(ROWS))


@pytest.mark.parametrize("result", ["delta", "sql"])
def test_a_table_that_someone_else_has_made_is_refused_and_left_alone(scene: Scene, result: str) -> None:
    out: Any = scene.results[result]
    out.add(arrived(0, 5))
    scene.files.add(arrived(0, ROWS))
    with pytest.raises(ScoringRefused, match="made by someone else"):
        score(scene.files, out)
    assert numbers(out) == list(range(5))


@pytest.mark.parametrize("result", ["delta", "sql"])
@pytest.mark.parametrize("first", [True, False])
def test_one_of_two_writers_at_the_same_time_is_refused(scene: Scene, result: str, first: bool) -> None:
    """The second has read the target before the first commits, and runs elsewhere."""
    rows, out = scene.files, scene.results[result]
    rows.add(arrived(0, ROWS))
    if not first:
        score(rows, out)
        rows.add(arrived(ROWS, ROWS))
    late, home = open_target(out.entry), os.environ["SERIN_HOME"]
    number = max(late.read_runs(), default=0) + 1
    done = score(rows, out)
    assert done is not None
    again = replace(done, t=done.t + 1)
    run_of(late.folder, number, out.read().slice(0, ROWS))
    with pytest.raises(ScoringRefused, match="another run has written it at the same time"):
        late.commit(number, again)
    assert numbers(out) == list(range(ROWS if first else 2 * ROWS))
    assert Path(home).is_dir()
    assert score(rows, out) is None


@pytest.mark.parametrize("result", ["delta", "sql"])
@pytest.mark.parametrize("number", [1, 2])
def test_commits_of_one_run_at_once_add_its_rows_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, result: str, number: int
) -> None:
    out, together, done = scene.results[result], threading.Barrier(2), list[float]()
    if number == 2:
        scene.files.add(arrived(0, ROWS))
        score(scene.files, out)
    rows_of_run = out.read() if number == 2 else arrived(0, ROWS)

    def commit(target: Target, run: ScoredRun) -> None:
        together.wait()
        try:
            target.commit(number, run)
        except ScoringRefused:
            return
        done.append(run.t)

    threads = []
    for writer in (1, 2):
        monkeypatch.setenv("SERIN_HOME", str(scene.folder / f"home-{writer}"))
        target = open_target(out.entry)
        assert len(target.read_runs()) == number - 1
        run_of(target.folder, number, rows_of_run)
        run = ScoredRun(release="m-v1", t=float(writer), rows=ROWS, files={})
        threads.append(threading.Thread(target=commit, args=(target, run)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = target.read_runs()
    assert [run.t for run in runs.values()][number - 1 :] == done
    assert len(done) <= 1  # both may be refused: then nothing is there
    if runs:
        assert len(numbers(out)) == ROWS * len(runs)


def run_of(folder: Path, number: int, rows: pa.Table) -> None:
    run_folder = folder / f"run-{number:05d}"
    run_folder.mkdir(parents=True)
    pq.write_table(rows, run_folder / "part-00000.parquet")


def test_a_target_that_cannot_be_written_is_named_and_the_next_run_commits_the_same_files(
    scene: Scene,
) -> None:
    rows, out = scene.files, scene.results["sql"]
    rows.add(arrived(0, ROWS))
    target = open_target(out.entry)
    os.environ["TEST_DATABASE"] += "?mode=ro"
    path = scene.folder / "database"
    path.rename(scene.folder / "away")
    with pytest.raises(ScoringRefused, match="env:TEST_DATABASE names a database file that does not exist"):
        score(rows, out)
    os.environ["TEST_DATABASE"] = f"sqlite:///{scene.folder}/away"
    assert score(rows, out) is not None
    assert [each.name for each in target.folder.iterdir()] == [".lock"]
    broken = Delta("/proc/nowhere/scores")
    with pytest.raises(ScoringRefused, match=r"cannot be written: .*/proc/nowhere.*; nothing of this run is"):
        score(rows, broken)
    made = open_target(broken.entry).folder / "run-00001" / "part-00000.parquet"
    before = made.stat().st_mtime_ns
    with pytest.raises(ScoringRefused, match="cannot be written"):
        score(rows, broken)
    assert made.stat().st_mtime_ns == before
