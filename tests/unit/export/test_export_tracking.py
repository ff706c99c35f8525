"""A version to a real MLflow store, and one that is published although there is none."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from serin.export.build import export_model
from serin.export.session import open_session
from serin.export.tracking import track_bundle
from serin.formats.bundle import read_golden
from serin.store.artifacts import NO_DATASET, Bundle, Checkpoint
from serin.store.store import Store
from tests.logs import heard
from tests.unit.export.small_dataset import make_trained
from tests.unit.export.test_own_inputs import picture_model, spec_in, taken_over


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Checkpoint]:
    trained = make_trained(tmp_path_factory.mktemp("trained"), "binary")
    store = Store(str(tmp_path_factory.mktemp("store")))
    bundle = export_model(trained.spec, trained.checkpoint, trained.dataset, store=store, lineage={})
    return bundle, trained.checkpoint


def test_a_version_becomes_a_model_of_mlflow_s_with_its_metrics(
    made: tuple[Bundle, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "flights")
    said: list[str] = []
    with heard(said.append):
        track_bundle(*made)
    assert said[0].startswith("flights version 1 is logged as a model of MLflow run")

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("flights")
    assert experiment is not None
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
    made: tuple[Bundle, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/a-file/inside")
    said: list[str] = []
    with heard(said.append):
        track_bundle(*made)
    assert "MLflow did not accept the version" in said[0]
    assert "published nevertheless" in said[0]


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
    assert said[-1].startswith("pictures version 1 is logged as a model of MLflow run")
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/model.test_accuracy")
    assert metric.read_text().split()[1] == "0.9"
