"""A table scored in bulk by Dask: equal to ONNX Runtime in one process, in order, however it is cut and by whom."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from distributed import LocalCluster

from serin.commands.predictions import predict_in_bulk
from serin.errors import EngineFailed, RowsUnfit
from serin.export.build import export_model
from serin.formats.schema import read_schema
from serin.formats.serving.spool_blocks import is_drawn
from serin.formats.wire import to_wire
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.scoring.bulk import find_pieces
from serin.scoring.session import open_session, run_in_batches
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.export.small_dataset import flights, make_trained

ROWS = 3000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trained = make_trained(tmp_path_factory.mktemp("trained"), "binary")
    store = Store(str(tmp_path_factory.mktemp("store")))
    return export_model(trained.spec, trained.checkpoint, trained.dataset, store=store, lineage={})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(flights(ROWS).append_column("id", pa.array(range(ROWS))), path, row_group_size=250)
    return path


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
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster:
        scored = predict(bundle, rows, tmp_path / "scored.parquet", scheduler=cluster.scheduler_address)
    np.testing.assert_array_equal(scored.column("score").to_numpy(), expected)
    with pytest.raises(EngineFailed, match=r"tcp://127\.0\.0\.1:1"):
        predict(bundle, rows, tmp_path / "none.parquet", scheduler="tcp://127.0.0.1:1")


def test_folders_and_globs_of_any_format_are_read_in_order_of_name(
    bundle: Bundle, expected: np.ndarray, tmp_path: Path
) -> None:
    table = flights(ROWS).append_column("id", pa.array(range(ROWS)))
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
    monkeypatch.setattr("serin.watcher.capture_duty.read_capture_spec", lambda _: settings)
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    table = pa.concat_tables([flights(ROWS)] * 8)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=ROWS)
    predict_in_bulk(bundle, str(tmp_path / "rows.parquet"), tmp_path / out, workers=2, scheduler=None)

    recorded = captured(tmp_path / "home", bundle.model)
    ids = recorded["_id"].unique().to_pylist()
    assert 0 < len(ids) < 24
    assert all(is_drawn(each, 0.5) for each in ids)
    assert recorded.num_rows == 1000 * len(ids)
    assert set(recorded["_source"].to_pylist()) == {"bulk"}
    assert recorded["carrier"].null_count == recorded.num_rows
    assert "origin" not in recorded.column_names
    request = recorded.filter(pc.equal(recorded["_id"], ids[0]))
    start = 1000 * int(ids[0].rpartition("-")[2])
    assert request["_row"].to_pylist() == list(range(1000))
    scores = request["_answer_score"].to_numpy()
    np.testing.assert_allclose(scores, expected[start : start + 1000], atol=1e-6)
    view = read_captures(tmp_path / "home", bundle.model)
    assert view is not None
    assert (view.requests, view.rows) == (len(ids), recorded.num_rows)


def test_records_that_cannot_be_written_do_not_fail_the_scoring(
    bundle: Bundle,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("serin.watcher.capture_duty.read_capture_spec", lambda _: CaptureSpec(share=1))
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
