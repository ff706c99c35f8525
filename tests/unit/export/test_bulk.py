"""A table scored in bulk by Dask: equal to ONNX Runtime in one process, in order, however it is cut and by whom; killed
and resumed, read from and written to an object store, and bound to a device's memory."""

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from distributed import LocalCluster
from distributed.client import FutureCancelledError
from distributed.comm.core import CommClosedError
from distributed.scheduler import KilledWorker

from serin.commands.predictions import predict_in_bulk
from serin.errors import EngineFailed, PredictionFailed, RowsUnfit
from serin.formats.bundle import read_manifest
from serin.formats.schema import read_schema
from serin.formats.serving.lots import is_drawn
from serin.formats.wire import to_wire
from serin.machine.hardware import inventory
from serin.machine.locks import locked
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.scoring import bulk
from serin.scoring.bulk import find_pieces, score_into_folder
from serin.scoring.parts import open_parts, plan_digest
from serin.scoring.predict import BoundFrontAndCore, Scorer
from serin.scoring.session import open_session, run_in_batches
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Bundle
from serin.store.file_systems import file_system
from tests.unit.export.small_dataset import flights, make_trained

ROWS, FILES = 3000, 6
WAIT_S = 120.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("trained")
    return make_trained(folder, "binary", export={"target": "gpu"}).export(folder)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return flights(ROWS).append_column("id", pa.array(range(ROWS)))


@pytest.fixture(scope="module")
def rows(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(table, path, row_group_size=250)
    return path


@pytest.fixture
def files(table: pa.Table, tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(FILES):
        part = table.slice(number * ROWS // FILES, ROWS // FILES)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=250)
    return folder


@pytest.fixture(scope="module")
def expected(bundle: Bundle) -> np.ndarray:
    """ONNX Runtime itself, asked for the same batches."""
    session = open_session(Path(bundle.path, "model.onnx"), threads=1)
    inputs = to_wire(flights(ROWS), read_schema(Path(bundle.path)))
    return run_in_batches(session, inputs, ["score"], 250)["score"][:, 0]


def predict(bundle: Bundle, rows: Path | str, out: Path, **how: object) -> pa.Table:
    settings = {"workers": 2, "scheduler": None, **how}
    assert predict_in_bulk(bundle, str(rows), out, **settings) == ROWS
    return pq.read_table(out)


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_are_those_of_onnx_runtime_bit_for_bit_and_in_order(
    bundle: Bundle, rows: Path, expected: np.ndarray, tmp_path: Path, workers: int
) -> None:
    scored = predict(bundle, rows, tmp_path / "scored.parquet", workers=workers)
    assert scored.column("id").to_pylist() == list(range(ROWS))
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected)


def test_a_folder_gets_a_file_for_each_piece(
    bundle: Bundle, rows: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    scored = predict(bundle, rows, tmp_path / "scored")
    assert len(list((tmp_path / "scored").iterdir())) == 12
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected)
    with pytest.raises(RowsUnfit, match="already exists"):
        predict(bundle, rows, tmp_path / "scored")


def test_a_cluster_gives_the_same_scores_and_one_that_is_not_there_is_an_error(
    bundle: Bundle, rows: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        scored = predict(bundle, rows, tmp_path / "scored.parquet", scheduler=cluster.scheduler_address)
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected)
    with pytest.raises(EngineFailed, match=r"tcp://127\.0\.0\.1:1"):
        predict(bundle, rows, tmp_path / "none.parquet", scheduler="tcp://127.0.0.1:1")


def test_folders_and_globs_of_any_format_are_read_in_order_of_name(
    bundle: Bundle, table: pa.Table, expected: np.ndarray, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(table.slice(0, 1000), tmp_path / "in" / "a.parquet")
    pacsv.write_csv(table.slice(1000, 1500), tmp_path / "in" / "b.csv")
    pq.write_table(table.slice(2500), tmp_path / "in" / "c.parquet")
    for place in (tmp_path / "in", tmp_path / "in" / "*"):
        assert len(find_pieces(place)) == 3
    out = tmp_path / "scored.csv"
    assert predict_in_bulk(bundle, str(tmp_path / "in"), out, workers=2, scheduler=None) == ROWS
    scored = pacsv.read_csv(out)
    assert scored.column("id").to_pylist() == list(range(ROWS))
    np.testing.assert_allclose(scored.column("score").to_numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("out", ["scored.parquet", "scored"])
def test_rows_are_recorded_when_the_spec_says_so(
    bundle: Bundle, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    settings = CaptureSpec(share=0.5, mask=("carrier",), drop=("origin",))
    monkeypatch.setattr("serin.spec.stored.stored_capture", lambda _: settings)
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    table = pa.concat_tables([flights(ROWS)] * 8)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=ROWS)
    predict_in_bulk(bundle, str(tmp_path / "rows.parquet"), tmp_path / out, workers=2, scheduler=None)

    recorded = captured(tmp_path / "home", bundle.model)
    ids = recorded["_id"].unique().to_pylist()
    assert 0 < len(ids) < 24
    assert all(is_drawn(each, 0.5) for each in ids)
    assert recorded.num_rows == 1000 * len(ids)
    assert set(recorded["_source"].to_pylist()) == {"batch"}
    assert len(recorded["_t"].unique()) == 1
    assert recorded["carrier"].null_count == recorded.num_rows
    assert "origin" not in recorded.column_names
    request = recorded.filter(pc.equal(recorded["_id"], ids[0]))
    start = 1000 * int(ids[0].rpartition("-")[2])
    assert request["_row"].to_pylist() == list(range(1000))
    scores = request["_answer_score"].to_numpy()
    np.testing.assert_allclose(scores, expected[start : start + 1000], atol=1e-6)
    view = read_captures(tmp_path / "home", bundle.model)
    assert (view.requests, view.rows) == (len(ids), recorded.num_rows)


def test_records_that_cannot_be_written_do_not_fail_the_scoring(
    bundle: Bundle,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("serin.spec.stored.stored_capture", lambda _: CaptureSpec(share=1))
    (tmp_path / "home").write_text("in the way")
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    assert predict(bundle, rows, tmp_path / "scored.parquet").num_rows == ROWS
    assert "not recorded" in caplog.text


def test_nothing_to_read_is_one_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RowsUnfit, match="no file at"):
        find_pieces(tmp_path / "nowhere-*.parquet")
    pq.write_table(flights(1).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(RowsUnfit, match="has no rows"):
        predict(bundle, tmp_path / "none.parquet", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from serin.scoring import parts
from serin.scoring.bulk import find_pieces, score_into_folder
write, left = parts.FolderParts.write, [int(sys.argv[4])]
def write_and_die(self, number, table):
    write(self, number, table)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
parts.FolderParts.write = write_and_die
score_into_folder(Path(sys.argv[1]), find_pieces(sys.argv[2]), sys.argv[3], workers=1)
"""


def parts_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*.parquet")}


def test_after_kill_9_only_unfinished_parts_are_scored_again(
    bundle: Bundle, files: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    out = tmp_path / "scored"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, bundle.path, str(files), str(out), "5"], timeout=WAIT_S, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    (partial,) = tmp_path.glob(".scored.*.partial")
    before = parts_of(partial)
    assert len(before) == 5
    missing = next(
        name for name in (f"part-{number:05d}.parquet" for number in range(12)) if name not in before
    )
    (partial / missing).write_bytes(b"half a file")
    (partial / f"{missing}.0a1b").write_bytes(b"half a file")

    assert predict_in_bulk(bundle, str(files), out, workers=2, scheduler=None) == ROWS

    after = parts_of(out)
    assert len(after) == 12
    assert {name: after[name] for name in before} == before, "they were not written again"
    assert sorted(path.name for path in out.iterdir()) == sorted(after), "nothing else is left"
    assert not partial.exists()
    scored = pq.read_table(out)
    assert scored.column("id").to_pylist() == list(range(ROWS))
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected)


def test_parts_of_other_rows_are_not_kept(
    bundle: Bundle, files: Path, table: pa.Table, tmp_path: Path
) -> None:
    out = tmp_path / "scored"
    command = [sys.executable, "-c", KILLED, bundle.path, str(files), str(out), "2"]
    subprocess.run(command, timeout=WAIT_S, check=False)
    (partial,) = tmp_path.glob(".scored.*.partial")
    assert len(parts_of(partial)) == 2
    time.sleep(0.01)  # another time of modification
    pq.write_table(table.slice(1000, 500), files / "0.parquet", row_group_size=250)
    assert predict_in_bulk(bundle, str(files), out, workers=2, scheduler=None) == ROWS
    assert pq.read_table(out).column("id").to_pylist()[:500] == list(range(1000, 1500))
    assert not partial.exists()


def test_a_worker_that_was_taken_for_lost_writes_no_part_of_the_next_plan(tmp_path: Path) -> None:
    rows = [pa.table({"plan": [number]}) for number in (1, 2)]
    out = str(tmp_path / "scored")
    with open_parts(out, "1" * 64) as old:
        old.write(0, rows[0])
    with open_parts(out, "2" * 64) as new:
        new.write(0, rows[1])
        with pytest.raises(FileNotFoundError):
            old.write(0, rows[0])
        new.finish()
    assert pq.read_table(out).equals(rows[1])


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet without groups"])
def test_a_file_without_rows_is_a_part_without_rows(
    bundle: Bundle, table: pa.Table, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "in").mkdir()
    empty = table.slice(0, 0)
    if kind == "csv":
        pacsv.write_csv(empty, tmp_path / "in" / "a.csv")
        pacsv.write_csv(table, tmp_path / "in" / "b.csv")
    else:
        with pq.ParquetWriter(tmp_path / "in" / "a.parquet", table.schema) as writer:
            if kind == "parquet":
                writer.write_table(empty)
        pq.write_table(table, tmp_path / "in" / "b.parquet")
    assert predict(bundle, tmp_path / "in", tmp_path / "scored").num_rows == ROWS
    first, second = (pq.read_schema(path) for path in sorted((tmp_path / "scored").iterdir()))
    assert first.equals(second)
    out = tmp_path / "one.parquet"
    assert predict(bundle, tmp_path / "in", out).num_rows == ROWS


def test_a_lost_worker_or_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, address: str, timeout: float) -> None: ...
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *given: object) -> None: ...
        def compute(self, tasks: list[object]) -> list[object]:
            return tasks

        def gather(self, futures: list[Any]) -> None:
            raise futures[0]

    monkeypatch.setattr("distributed.Client", Client)
    gone = CommClosedError("closed"), FutureCancelledError("piece", "scheduler-connection-lost")
    for error, words in (
        (
            KilledWorker("piece", SimpleNamespace(address="tcp://host:2"), 3),
            "a piece ended every worker that it was given to",
        ),
        *((each, "the scheduler is gone") for each in gone),
    ):
        with pytest.raises(EngineFailed, match=words), bulk._engine(1, "tcp://host:1") as compute:
            compute([error])


def test_threads_that_begin_together_open_the_version_once(
    bundle: Bundle, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Counted(Scorer):
        def __init__(self, folder: str, **how: Any) -> None:
            opened.append(folder)
            super().__init__(folder, **how)

    bulk._scorer.cache_clear()
    monkeypatch.setattr(bulk, "Scorer", Counted)
    assert predict_in_bulk(bundle, str(files), tmp_path / "scored", workers=8, scheduler=None) == ROWS
    bulk._scorer.cache_clear()
    assert opened == [bundle.path]


def test_two_runs_do_not_write_the_same_result(bundle: Bundle, files: Path, tmp_path: Path) -> None:
    with locked(tmp_path / ".scored.lock"), pytest.raises(RowsUnfit, match="another run writes it"):
        score_into_folder(Path(bundle.path), find_pieces(files), tmp_path / "scored", workers=1)


def test_rows_come_from_s3_and_scores_go_there(
    bundle: Bundle, files: Path, table: pa.Table, expected: np.ndarray, bucket: str, tmp_path: Path
) -> None:
    system, _ = file_system(bucket)
    pacsv.write_csv(table.slice(2500), tmp_path / "5.csv")
    for path in (*sorted(files.glob("[0-4].parquet")), tmp_path / "5.csv"):
        system.pipe_file(f"{bucket}/in/{path.name}", path.read_bytes())
    for rows in (f"{bucket}/in", f"{bucket}/in/*"):
        assert len(find_pieces(rows)) == 11
    out = f"{bucket}/out"
    assert predict_in_bulk(bundle, f"{bucket}/in", out, workers=2, scheduler=None) == ROWS
    names = sorted(path.rpartition("/")[2] for path in system.find(out))
    assert names == ["_SUCCESS", *(f"part-{number:05d}.parquet" for number in range(11))]
    scored = pa.concat_tables([pq.read_table(system.open(f"{out}/{name}")) for name in names[1:-1]])
    assert scored.column("id").to_pylist() == list(range(2500))
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected[:2500])
    with pytest.raises(RowsUnfit, match="already exists"):
        predict_in_bulk(bundle, f"{bucket}/in", out, workers=2, scheduler=None)
    with pytest.raises(RowsUnfit, match=re.escape(f"no file at {bucket}/nothing/*")):
        find_pieces(f"{bucket}/nothing/*")


def _same_rows_otherwise(part: bytes) -> bytes:
    """The rows of a part in other bytes: whether it is written again can be seen."""
    content = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(part)), content, compression="none")
    return content.getvalue()


def test_a_result_at_a_url_is_completed_too(bundle: Bundle, files: Path, bucket: str) -> None:
    system, out = file_system(bucket)[0], f"{bucket}/out"
    pieces = find_pieces(files)
    score_into_folder(Path(bundle.path), pieces, out, workers=2)
    parts = sorted(system.glob(f"{out}/part-*"))
    plan = b'{"format": "serin.bulk", "version": 1, "digest": "%s"}'
    digest = plan_digest(read_manifest(Path(bundle.path)).digest, "cpu", pieces)
    system.pipe_file(f"{out}/plan.json", plan % digest.encode())
    system.rm_file(f"{out}/_SUCCESS")
    for path in parts[3:]:
        system.rm_file(path)
    others = {path: _same_rows_otherwise(system.cat_file(path)) for path in parts[:3]}
    for path, content in others.items():
        system.pipe_file(path, content)
    system.invalidate_cache()
    assert score_into_folder(Path(bundle.path), pieces, out, workers=2) == ROWS
    system.invalidate_cache()
    assert {path: system.cat_file(path) for path in parts[:3]} == others
    names = {path.rpartition("/")[2] for path in system.find(out)}
    assert names == {"_SUCCESS", *(f"part-{number:05d}.parquet" for number in range(12))}


def test_a_core_that_is_bound_to_memory_answers_as_the_whole_graph_does(
    bundle: Bundle, table: pa.Table, expected: np.ndarray
) -> None:
    folder = Path(bundle.path)
    front, core = (open_session(folder / name, threads=1) for name in ("front.onnx", "core.onnx"))
    bound = BoundFrontAndCore(front, core, "cpu", 700)  # four whole batches in the same memory, and a rest
    found = run_in_batches(bound, to_wire(table, read_schema(folder)), ["score"], 700)["score"][:, 0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.skipif(bool(inventory()), reason="this machine has a GPU; see tests/gpu")
def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_and_auto_takes_the_cpu(
    bundle: Bundle, files: Path, tmp_path: Path
) -> None:
    asked = {"workers": 1, "scheduler": None}
    with pytest.raises(PredictionFailed, match="--device gpu: there is no GPU here"):
        predict_in_bulk(bundle, str(files), tmp_path / "gpu", device="gpu", **asked)
    assert predict_in_bulk(bundle, str(files), tmp_path / "auto", device="auto", **asked) == ROWS
