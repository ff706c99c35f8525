"""Scheduled scoring into a folder: each row once, whatever is killed; what does not fit changes nothing."""

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import ScoringRefused, StageStopped
from serin.formats.dataset import SourceFile
from serin.monitoring.capture.bulk import BulkRecords
from serin.monitoring.capture.read import captured
from serin.monitoring.quality.labels import Columns
from serin.pipeline import labels
from serin.pipeline import score as use_case
from serin.pipeline.new_rows import settled
from serin.pipeline.score import open_target, score_new
from serin.scoring import parts
from serin.scoring.targets.folder import FolderTarget
from serin.scoring.targets.target import ScoredRun, run_folders, run_number
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.fakes import live_quality
from tests.fakes.live_quality import publish
from tests.kit.score_tables import Delta, Files, arrived
from tests.unit.serving import bundles

MODEL, ROWS = bundles.MODEL, 300


@dataclass
class Scene:
    folder: Path
    bundle: Bundle

    @property
    def rows(self) -> str:
        return str(self.folder / "rows" / "date=*" / "*.parquet")

    @property
    def out(self) -> Path:
        return self.folder / "scored"

    def arrive(self, day: int, *, column: pa.Array | None = None, into: str = "rows") -> None:
        """The file of a day, with three row groups. `column`: another one in it."""
        table = pa.table(
            {name: values[:, 0].tolist() for name, values in bundles.rows(ROWS, seed=day).items()}
        )
        table = table.append_column("row", pa.array(np.arange(ROWS) + day * ROWS))
        if column is not None:
            table = table.append_column("more", column)
        path = self.folder / into / f"date=2026-01-{day:02d}" / "part.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=100)

    def remove(self, day: int) -> None:
        (self.folder / "rows" / f"date=2026-01-{day:02d}" / "part.parquet").unlink(missing_ok=True)

    def score(self, **how: object) -> ScoredRun | None:
        done = score_new(MODEL, self.rows, str(self.out), workers=2, **how)  # type: ignore[arg-type]
        return None if done is None else done.run

    def scored(self) -> pa.Table:
        """What a reader of the folder finds."""
        return pq.read_table(self.out)

    def days(self) -> list[int]:
        found = self.scored().column("row").to_pylist() if self.out.exists() else []
        assert len(found) == len(set(found)), "a row is there twice"
        assert len(found) % ROWS == 0, "a file is there in part"
        return sorted({row // ROWS for row in found})

    def recorded(self) -> list[tuple[str, int]]:
        table = captured(Path(os.environ["SERIN_HOME"]), MODEL, columns=["_id", "_row", "_source"])
        assert set(table.column("_source").to_pylist()) <= {"bulk"}
        return list(zip(table.column("_id").to_pylist(), table.column("_row").to_pylist(), strict=True))


@pytest.fixture
def scene(home: Path, tmp_path: Path) -> Scene:
    return Scene(folder=tmp_path, bundle=publish(Store.open(), 0.0, "{capture: {share: 1}}"))


def test_each_run_scores_the_files_that_have_come_since_the_last(scene: Scene) -> None:
    scene.arrive(1)
    scene.arrive(2)
    first = scene.score()
    assert first is not None
    assert (first.release, first.rows, len(first.files)) == (f"{MODEL}-v1", 2 * ROWS, 2)
    assert scene.score() is None
    scene.arrive(3)
    second = scene.score()
    assert second is not None
    assert [Path(path).parent.name for path in second.files] == ["date=2026-01-03"]
    assert scene.days() == [1, 2, 3]
    assert list(FolderTarget(scene.out).read_runs()) == [1, 2]
    table = scene.scored().sort_by("row")
    wanted = np.concatenate(
        [bundles.score(scene.bundle.path, bundles.rows(ROWS, seed=day))[:, 0] for day in (1, 2, 3)]
    )
    np.testing.assert_allclose(table.column("score").to_numpy(), wanted, atol=1e-6)
    recorded = scene.recorded()
    assert len(recorded) == len(set(recorded)) == 3 * ROWS


def test_records_that_a_kill_cut_short_are_completed_by_the_next_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.arrive(1)
    with monkeypatch.context() as patch:
        patch.setattr(use_case, "_record", lambda *given: None)
        scene.score()
    assert scene.recorded() == []
    assert scene.score() is None
    assert len(scene.recorded()) == ROWS


def test_labels_find_the_rows_of_a_run_by_the_column_that_names_them(scene: Scene) -> None:
    spec = live_quality.spec().replace("data:", "data:\n  id: distance")
    bundle = bundles.publish(Store.open(), bias=0.0, spec=spec)
    numbers = pa.array(range(ROWS))
    rows = Files(scene.folder / "payments")
    rows.add(arrived(0, ROWS).drop_columns(["distance"]).append_column("distance", numbers))
    assert score_new(f"{MODEL}:{bundle.version}", rows.entry, str(scene.out)) is not None
    known = pa.table({"distance": numbers.take(pa.array(range(ROWS - 1, -1, -1))), "arr_delay": [20] * ROWS})
    added = labels.add(bundle, known, Columns())
    assert (added.key, added.matched, added.unknown) == ("distance", ROWS, 0)


@pytest.mark.parametrize("table", [False, True])
def test_records_that_cannot_be_written_are_written_by_a_later_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, table: bool
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    out = Delta(str(scene.folder / "delta")).entry if table else str(scene.out)
    for day in (1, 2):
        scene.arrive(day)
        with monkeypatch.context() as patch:
            patch.setattr(BulkRecords, "_write", full)
            assert score_new(MODEL, scene.rows, out, workers=2) is not None
    assert scene.recorded() == []
    assert score_new(MODEL, scene.rows, out, workers=2) is None
    recorded = scene.recorded()
    assert len(recorded) == len(set(recorded)) == 2 * ROWS
    assert table == (run_folders(open_target(out).folder) == {})


def test_records_of_a_killed_run_outlive_a_run_from_another_home(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Delta(str(scene.folder / "delta")).entry
    monkeypatch.setenv("SERIN_STORE", Store.open().url)
    scene.arrive(1)
    with monkeypatch.context() as patch:
        patch.setattr(use_case, "_finish", lambda *given: None)
        score_new(MODEL, scene.rows, out, workers=2)
    scene.arrive(2)
    with monkeypatch.context() as patch:
        patch.setenv("SERIN_HOME", str(scene.folder / "another"))
        assert score_new(MODEL, scene.rows, out, workers=2) is not None
        assert len(scene.recorded()) == ROWS
    assert score_new(MODEL, scene.rows, out, workers=2) is None
    assert len(scene.recorded()) == ROWS


def test_what_kills_leave_beside_runs_is_removed(scene: Scene) -> None:
    scene.arrive(1)
    scene.out.mkdir()
    left = [scene.out / f".run-0000{number}.{kind}" for number in (1, 2) for kind in ("lock", "abc.partial")]
    for path in left:
        path.mkdir() if path.suffix == ".partial" else path.touch()
    ours = scene.out / ".run-old"
    ours.mkdir()
    scene.score()
    assert [path.exists() for path in left] == [False, False, True, True]
    assert ours.exists()
    assert run_number("run-100000") == 100_000


@pytest.mark.parametrize("how", ["changed", "late", "type", "column"])
def test_files_that_do_not_fit_are_named_and_change_nothing(scene: Scene, how: str) -> None:
    scene.arrive(2)
    scene.score()
    before = sorted(path.name for path in scene.out.rglob("run-*/*"))
    if how == "changed":
        scene.arrive(2, column=pa.array(range(ROWS)))
    elif how == "late":
        scene.arrive(1)
    else:
        scene.arrive(3, column=pa.array(range(ROWS)) if how == "column" else None)
        if how == "type":
            path = scene.folder / "rows" / "date=2026-01-03" / "part.parquet"
            table = pq.read_table(path)
            place = table.column_names.index("row")
            pq.write_table(table.set_column(place, "row", table.column("row").cast(pa.string())), path)
    words = {
        "changed": "date=2026-01-02/part.parquet changed after being scored",
        "late": "date=2026-01-01/part.parquet came late",
        "type": "row is string, before int64",
        "column": "more is int64, before missing",
    }
    with pytest.raises(ScoringRefused, match=words[how]):
        scene.score()
    assert sorted(path.name for path in scene.out.rglob("run-*/*")) == before
    if how == "late":
        assert scene.score(since="date=2026-01-02") is None
        scene.arrive(3)
        later = scene.score(since="date=2026-01-02")
        assert later is not None
        assert len(later.files) == 1
        assert scene.score(late=True) is not None
        assert scene.days() == [1, 2, 3]


def test_a_file_that_changes_while_it_is_scored_is_named_and_nothing_appears(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.arrive(1)
    scene.arrive(2)
    all_written = parts.FolderParts.schema

    def then(change: Callable[[int], None]) -> Callable[..., pa.Schema]:
        def schema(self: parts.FolderParts, number: int) -> pa.Schema:
            change(2)
            return all_written(self, number)

        return schema

    for change in (scene.arrive, scene.remove):
        with monkeypatch.context() as patch:
            patch.setattr(parts.FolderParts, "schema", then(change))
            with pytest.raises(ScoringRefused, match=r"date=2026-01-02/part\.parquet changed while it was"):
                scene.score()
    assert FolderTarget(scene.out).read_runs() == {}
    scene.arrive(2)
    scene.score()
    assert scene.days() == [1, 2]


def test_a_watermark_that_is_gone_is_named_and_other_folders_are_left_alone(scene: Scene) -> None:
    (scene.out / "run-old").mkdir(parents=True)
    for day in (1, 2):
        scene.arrive(day)
        scene.score()
    (scene.out / "run-00001" / "_SUCCESS").unlink()
    for how in ({}, {"late": True}, {"since": "date=2026-01-01"}):
        with pytest.raises(ScoringRefused, match="the watermark of run 1 is gone; restore it"):
            scene.score(**how)
    assert scene.days() == [1, 2]
    (scene.out / "run-00002" / "_SUCCESS").unlink()
    (scene.out / "run-00001").rename(scene.folder / "away")
    with pytest.raises(ScoringRefused, match="the watermark of run 1 is gone"):
        scene.score()
    assert (scene.out / "run-old").is_dir()


def test_a_partition_that_is_gone_changes_no_type(scene: Scene) -> None:
    rows = scene.folder / "regions"
    for number, region in enumerate(("5", "eu")):
        Files(rows / f"region={region}").add(arrived(number * ROWS, ROWS))
    assert score_new(MODEL, str(rows), str(scene.out)) is not None
    shutil.rmtree(rows / "region=eu")
    Files(rows / "region=5").add(arrived(2 * ROWS, ROWS))
    assert score_new(MODEL, str(rows), str(scene.out), late=True) is not None
    assert set(scene.scored().column("region").to_pylist()) == {"5", "eu"}


def test_files_without_rows_are_scored_like_others(scene: Scene) -> None:
    rows = Files(scene.folder / "payments")
    rows.add(arrived(0, ROWS))
    with pq.ParquetWriter(rows.folder / "1.parquet", arrived(0, 1).schema):
        pass
    first = score_new(MODEL, rows.entry, str(scene.out))
    assert first is not None
    assert (first.run.rows, len(first.run.files)) == (ROWS, 2)
    with pq.ParquetWriter(rows.folder / "2.parquet", arrived(0, 1).schema):
        pass
    alone = score_new(MODEL, rows.entry, str(scene.out))
    assert alone is not None
    assert alone.run.rows == 0
    assert score_new(MODEL, rows.entry, str(scene.out)) is None
    assert scene.scored().num_rows == ROWS


def test_rows_that_are_nowhere_are_refused_until_there_were_any(scene: Scene) -> None:
    rows = Files(scene.folder / "payments")
    for entry in (rows.entry, {"path": rows.entry}, {"delta": rows.entry}):
        with pytest.raises(ScoringRefused, match="payments: there is nothing; correct the path"):
            score_new(MODEL, entry, str(scene.out))
    assert score_new(MODEL, f"{rows.folder}/*.parquet", str(scene.out)) is None
    rows.folder.mkdir()
    assert score_new(MODEL, rows.entry, str(scene.out)) is None
    rows.add(arrived(0, ROWS))
    assert score_new(MODEL, rows.entry, str(scene.out)) is not None
    shutil.rmtree(rows.folder)
    assert score_new(MODEL, rows.entry, str(scene.out)) is None


def test_files_that_may_still_change_wait_for_the_next_run() -> None:
    """A server that says only when a file was changed says so in seconds."""
    old, young = "mtime=1 size=9", "mtime=2 size=9"
    known = [("a", old, old), ("b", young, ""), ("c", old, old), ("d", "", "")]
    files = [
        SourceFile(table="rows", path=f"sftp://host/{name}.csv", size=9, modified=modified, content=content)
        for name, modified, content in known
    ]
    assert [Path(file.path).stem for file in settled(files)] == ["a"]
    later = [replace(file, content=file.modified) for file in files]
    assert settled(later) == later


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("s3://bucket/scores", "use a Delta table there: --out '{delta: s3://bucket/scores}'"),
        ("scores.parquet", "it is a file"),
    ],
)
def test_a_target_that_cannot_take_a_run_in_one_step_is_refused_by_name(
    scene: Scene, out: str, words: str
) -> None:
    scene.arrive(1)
    with pytest.raises(ScoringRefused, match=words):
        score_new(MODEL, scene.rows, out)


def test_a_full_disk_is_named_and_the_next_run_completes_the_rows(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.arrive(1)
    written, calls = parts.FolderParts.write, itertools.count(1)

    def full(self: parts.FolderParts, number: int, table: pa.Table) -> None:
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        written(self, number, table)

    with monkeypatch.context() as patch:
        patch.setattr(parts.FolderParts, "write", full)
        with pytest.raises(ScoringRefused, match="No space left on device; nothing of this run is there"):
            scene.score()
    assert FolderTarget(scene.out).read_runs() == {}
    receipt = score_new(MODEL, scene.rows, str(scene.out), workers=2).receipt  # type: ignore[union-attr]
    assert receipt.rows is not None
    assert 0 < receipt.rows < ROWS  # those that this attempt has scored
    assert scene.days() == [1]


def test_a_run_that_is_stopped_does_not_appear_and_the_next_continues_it(scene: Scene) -> None:
    scene.arrive(1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StageStopped):
        scene.score(stop=stop)
    assert FolderTarget(scene.out).read_runs() == {}
    scene.score()
    assert scene.days() == [1]


def test_two_runs_into_one_target_at_once_are_refused(scene: Scene) -> None:
    scene.arrive(1)
    with (
        use_case._locked(FolderTarget(scene.out)),
        pytest.raises(ScoringRefused, match="another run writes it"),
    ):
        scene.score()
