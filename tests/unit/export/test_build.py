"""An export from weights to a published version, also to a real MLflow store."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from serin.errors import BundleBroken, ExportFailed, GateFailed, RowsUnfit
from serin.export.build import export_model
from serin.export.gate.gate import read_golden_rows
from serin.export.registry import track_bundle
from serin.formats.bundle import read_golden, verify_bundle
from serin.formats.quality import read_quality_reference
from serin.formats.rows import write_rows
from serin.formats.schema import Schema, Task
from serin.scoring.bulk import find_pieces, score_pieces
from serin.scoring.predict import Scorer, score_table
from serin.scoring.session import FrontAndCore, open_session
from serin.spec.yaml_file import read_yaml
from serin.store.artifacts import NO_DATASET, Bundle
from serin.store.store import Store
from tests.kit.web import Handler, web_server
from tests.logs import heard
from tests.unit.export.small_dataset import Trained, flights, make_trained
from tests.unit.export.test_own_inputs import picture_model, spec_in, taken_over


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_trained(tmp_path_factory.mktemp("trained"), "binary")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def bundle(trained: Trained, store: Store) -> Bundle:
    return trained.export(store, {"run": "r|1", "dataset": "?"})


def strange_rows() -> pa.Table:
    """What the training never saw: unknown names, nothing but nulls, the ends of every range."""
    return pa.table(
        {
            "carrier": ["ZZ", None, "AA", "x" * 5000],
            "distance": [np.inf, None, -1e30, 1e308],
            "tailnum": ["N29", None, "N3", "unseen ü"],
            "dep": pa.array([-1, None, 9_214_646_400_000_000, -62_135_596_800_000_000], pa.timestamp("us")),
            "stops": [2**62, None, -(2**62), 0],
            "night": [True, None, False, True],
            "num": [1e-45, None, 3e38, -0.0],
        }
    )


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return torch.sigmoid(torch.from_numpy(logits)).numpy()


def test_a_published_model_scores_raw_rows_as_the_trained_network_does(
    trained: Trained, bundle: Bundle
) -> None:
    rows = pa.concat_tables([flights(), strange_rows()], promote_options="permissive")
    scored = score_table(bundle.path, rows)
    assert scored.column_names == [*rows.column_names, "score"]
    np.testing.assert_allclose(
        scored.column("score").to_numpy(), sigmoid(trained.logits(rows))[:, 0], atol=1e-6
    )


def test_a_frame_is_scored_as_the_table_it_came_from(bundle: Bundle) -> None:
    scorer = Scorer(bundle.path)
    from_table, from_frame = scorer.answers(flights()), scorer.answers(flights().to_pandas())
    np.testing.assert_array_equal(from_table["score"], from_frame["score"])


def test_no_rows_have_no_scores(bundle: Bundle) -> None:
    assert score_table(bundle.path, flights().slice(0, 0)).column("score").to_pylist() == []


def score_file(bundle: Bundle, rows: Path, out: Path) -> int:
    with write_rows(out) as writer:
        return score_pieces(Path(bundle.path), find_pieces(rows), writer, workers=1)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_files_of_every_kind_give_the_same_scores(bundle: Bundle, tmp_path: Path, suffix: str) -> None:
    pq.write_table(flights(50), tmp_path / "rows.parquet")
    said: list[str] = []
    text = tmp_path / f"text{suffix}"
    with heard(said.append):
        assert score_file(bundle, tmp_path / "rows.parquet", text) == 50
    assert said == ["scored 50 rows"]
    again = tmp_path / "again.parquet"
    without_score = tmp_path / f"in{suffix}"
    _drop_score(text, without_score)
    score_file(bundle, without_score, again)
    wanted = score_table(bundle.path, flights(50)).column("score")
    assert pq.read_table(again).column("score").to_pylist() == wanted.to_pylist()


def _drop_score(source: Path, target: Path) -> None:
    match source.suffix:
        case ".parquet":
            pq.write_table(pq.read_table(source).drop_columns("score"), target)
        case ".csv":
            lines = [line.rsplit(",", 1)[0] for line in source.read_text().splitlines()]
            target.write_text("\n".join(lines) + "\n")
        case ".jsonl":
            rows = [json.loads(line) for line in source.read_text().splitlines()]
            kept = [{name: value for name, value in row.items() if name != "score"} for row in rows]
            target.write_text("".join(json.dumps(row) + "\n" for row in kept))


def test_rows_that_bring_a_score_of_their_own_or_none_at_all_are_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(RowsUnfit, match="'score' has the name of the model's answer"):
        score_table(bundle.path, flights(3).append_column("score", [[1, 2, 3]]))
    pq.write_table(flights(3).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(RowsUnfit, match="has no rows"):
        score_file(bundle, tmp_path / "none.parquet", tmp_path / "out.parquet")


def test_the_bundle_holds_what_it_promises_and_nothing_else(trained: Trained, bundle: Bundle) -> None:
    manifest = verify_bundle(Path(bundle.path))
    assert sorted(manifest.files) == [
        "card.md", "champion.json", "explain/columns.json", "explain/model.json", "explain/weights.safetensors",
        "features.json", "gate.json", "golden.parquet", "importance.json", "lookups.json", "lookups/planes.parquet",
        "metrics.json", "model.onnx", "quality.json", "schema.json", "spec.yaml",
    ]  # fmt: skip
    assert manifest.lineage == {
        "run": "r|1",
        "dataset": trained.dataset.digest,
        "training_step": 12,
        "sources": [{"table": "flights", "path": "flights.parquet", "bytes": 1, "modified": "0"}],
    }
    assert (manifest.digest, bundle.metrics) == (bundle.digest, trained.checkpoint.metrics)
    spec = read_yaml(Path(bundle.path, "spec.yaml").read_text())
    assert spec["name"] == "flights"
    gate = json.loads(Path(bundle.path, "gate.json").read_text())
    assert (gate["passed"], gate["feature_columns"]) == (True, 10)
    assert gate["batch_rows"] == [1, 2, 3, 7, 8, 9, 16, 63, 64, 65, 100, 1024]
    assert (gate["chosen"], gate["target"], gate["made_by"]) == ("fp32", "cpu", "torch")
    assert gate["runtime"]["threads"] >= 1
    assert gate["allowed_difference"] == gate["tolerance"] == 1e-4
    quality = read_quality_reference(Path(bundle.path))
    assert quality.metrics["auc"].value == pytest.approx(gate["test_onnx"]["auc"])
    assert quality.loss == quality.metrics["brier"].value
    assert (quality.block_s, sum(rows for *_, rows in quality.reliability)) == (86_400.0, quality.rows)
    champion = json.loads(Path(bundle.path, "champion.json").read_text())
    assert (champion["verdict"], champion["reason"]) == ("not compared", "there is no live model")


def test_golden_rows_carry_the_scores_of_the_published_graph(bundle: Bundle) -> None:
    golden = read_golden(Path(bundle.path))
    table = pa.table({name: values[:, 0] for name, values in golden.inputs.items()})
    np.testing.assert_array_equal(Scorer(bundle.path).answers(table)["score"], golden.outputs["score"])
    assert golden.row.tolist() == list(range(250, 350))


def test_the_card_tells_a_person_what_to_send_and_what_was_proven(bundle: Bundle) -> None:
    card = Path(bundle.path, "card.md").read_text()
    for text in (
        "# flights, version 1", "`arr_delay > 15` (binary)", "| `night` | bool | INT8 | `-1` |",
        "`seats`, `maker` by `tailnum`", "carrier (categorical)", "| valid_auc | 0.5 |", "3 (target is null)",
        "10 feature columns are bit-identical to training", "## Importance of columns", r"`r\|1`",
    ):  # fmt: skip
        assert text in card


def test_the_same_weights_give_the_same_graph_under_the_next_number(
    trained: Trained, bundle: Bundle, store: Store
) -> None:
    again = trained.export(store)
    assert (bundle.version, again.version) == (1, 2)
    first, second = (onnx.load(Path(b.path, "model.onnx")) for b in (bundle, again))
    assert first.graph.SerializeToString(deterministic=True) == second.graph.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_other_tasks_answer_in_their_own_form(task: Task, tmp_path: Path) -> None:
    trained = make_trained(tmp_path, task)
    scored = score_table(trained.export(tmp_path).path, flights())
    logits = trained.logits(flights())
    if task == "regression":
        np.testing.assert_allclose(scored.column("score").to_numpy(), logits[:, 0], atol=1e-5)
    else:
        np.testing.assert_array_equal(scored.column("label").to_numpy(), logits.argmax(axis=1))
        assert np.allclose(np.sum(scored.column("probabilities").to_pylist(), axis=1), 1)


def test_a_model_that_fails_the_gate_takes_no_number_and_leaves_nothing(
    trained: Trained, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(trained.dataset.path, dataset)
    golden = pq.read_table(dataset / "golden.parquet")
    column = golden.column_names.index("num__distance")
    bent = golden.column(column).to_numpy().copy()
    bent[40] = np.nextafter(bent[40], np.float32(9))
    pq.write_table(golden.set_column(column, "num__distance", pa.array(bent)), dataset / "golden.parquet")
    store = Store(str(tmp_path / "store"))
    with pytest.raises(
        GateFailed, match=r"column 'distance' differs in 1 of 100 golden rows .* first in row 290"
    ):
        replace(trained, dataset=replace(trained.dataset, path=str(dataset))).export(store)
    assert [path for path in Path(store.url).rglob("*") if path.is_file()] == []


def test_weights_of_another_table_are_refused(trained: Trained, tmp_path: Path) -> None:
    other = make_trained(tmp_path, "multiclass")
    with pytest.raises(ExportFailed, match="trained for binary"):
        replace(other, checkpoint=trained.checkpoint).export(tmp_path)


def test_weights_that_were_trained_on_another_dataset_of_the_same_form_are_refused(
    trained: Trained, tmp_path: Path
) -> None:
    result = tmp_path / "result"
    shutil.copytree(trained.checkpoint.path, result)
    (result / "state.json").write_text(json.dumps({"dataset": "cd" * 32}))
    other = replace(trained, checkpoint=replace(trained.checkpoint, path=str(result)))
    with pytest.raises(ExportFailed, match="trained on dataset cdcdcdcdcdcd, not on abababababab"):
        other.export(tmp_path)


def test_a_request_column_called_as_one_of_the_golden_columns_is_refused(
    trained: Trained, tmp_path: Path
) -> None:
    golden = pq.read_table(Path(trained.dataset.path, "golden.parquet"))
    pq.write_table(golden.append_column("row", golden.column("num")), tmp_path / "golden.parquet")
    schema = Schema(task="binary", inputs=(), outputs=())
    with pytest.raises(ExportFailed, match="request column 'row' has a name that Serin uses"):
        read_golden_rows(tmp_path, schema, (), ())


def test_a_touched_bundle_is_not_scored_with(bundle: Bundle, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle.path, copy)
    content = bytearray((copy / "model.onnx").read_bytes())
    content[-1] ^= 1
    (copy / "model.onnx").write_bytes(content)
    with pytest.raises(BundleBroken, match=r"model\.onnx was changed"):
        score_table(copy, flights(1))


def test_for_a_gpu_the_bundle_holds_a_front_and_a_core_that_answer_as_the_whole_does(tmp_path: Path) -> None:
    trained = make_trained(tmp_path, "multiclass", export={"target": "gpu"})
    made = trained.export(tmp_path)
    folder = Path(made.path)
    assert {"front.onnx", "core.onnx", "model.onnx"} <= set(verify_bundle(folder).files)
    gate = json.loads((folder / "gate.json").read_text())
    assert gate["target"] == "gpu"
    assert gate["front_core_difference"] < 1e-5
    assert gate["allowed_difference"] == 0.05, "as export.variant_tolerance says"
    front, core = (open_session(folder / name) for name in ("front.onnx", "core.onnx"))
    texts = {tensor.type for tensor in core.get_inputs()}
    assert texts == {"tensor(float)", "tensor(int64)"}, "no text and no table reaches the accelerator"
    golden = read_golden(folder)
    found = FrontAndCore(front, core).run(["label", "probabilities"], golden.inputs)
    whole = open_session(folder / "model.onnx").run(["label", "probabilities"], golden.inputs)
    np.testing.assert_allclose(found[1], whole[1], atol=1e-6)


def test_a_version_becomes_a_model_of_mlflow_s_with_its_metrics(
    trained: Trained, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "flights")
    said: list[str] = []
    with heard(said.append):
        track_bundle(bundle, trained.checkpoint)
    assert said[0] == "flights version 1 is version 1 of flights in MLflow"

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("flights")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["model.valid_auc"] == 0.5
    assert run.data.metrics["variant.fp32.bytes"] > 0
    assert (run.data.tags["serin.release"], run.data.tags["serin.variant"]) == ("flights-v1", "fp32")
    fetched = Path(client.download_artifacts(run.info.run_id, "flights-v1", str(tmp_path)))
    flavors = yaml.safe_load((fetched / "MLmodel").read_text())["flavors"]
    session = open_session(onnx.load(fetched / flavors["onnx"]["data"]))
    golden = read_golden(fetched)
    np.testing.assert_array_equal(session.run(["score"], golden.inputs)[0], golden.outputs["score"])


def test_an_mlflow_that_accepts_nothing_is_reported(
    trained: Trained, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/a-file/inside")
    said: list[str] = []
    with heard(said.append):
        track_bundle(bundle, trained.checkpoint)
    assert "MLflow did not accept the version" in said[0]
    assert "published nevertheless" in said[0]


def test_an_mlflow_that_is_away_is_asked_once_and_not_waited_for(
    trained: Trained, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Away(Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer(b"", 503)

        def do_POST(self) -> None:
            self.do_GET()

    said: list[str] = []
    with web_server(Away) as port, heard(said.append):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        track_bundle(bundle, trained.checkpoint)
    assert len(asked) == 1, asked
    assert "MLflow did not accept the version" in said[0]


def test_a_version_with_custom_inputs_is_tracked_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    spec, store = spec_in(tmp_path / "own", picture_model()), Store(str(tmp_path / "store"))
    checkpoint = taken_over(spec, tmp_path / "run", {"test_accuracy": 0.9})
    said: list[str] = []
    with heard(said.append):
        export_model(spec, checkpoint, NO_DATASET, store=store, lineage={})
    assert said[-1] == "pictures version 1 is version 1 of pictures in MLflow"
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/model.test_accuracy")
    assert metric.read_text().split()[1] == "0.9"


def test_what_exports_trees_does_not_load_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import serin.export.build"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
