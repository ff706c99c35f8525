"""What was exported, as a real Triton serves it: equal to bulk scores; a team's own repository, taken as it is."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import ExportFailed, PredictionFailed, VerificationFailed
from serin.etl.build import build_dataset
from serin.export.build import export_model
from serin.export.take_over import import_repository
from serin.formats.schema import NULL_OF_KIND, InputColumn, OutputTensor, Schema, read_schema, write_schema
from serin.formats.shards import read_split
from serin.formats.trained import read_blend
from serin.formats.wire import to_wire
from serin.metrics import auc
from serin.models.build import open_margins
from serin.models.trees import scores
from serin.scoring.predict import Scorer
from serin.serving.client.client import predict
from serin.serving.triton.releases import Releases
from serin.spec.load import load_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.training.launch import launcher
from tests.e2e.serving_host import ChildHost, wait_for
from tests.fakes.small_pipeline import small_spec
from tests.unit.export.small_dataset import flights, make_trained

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            (tensor,) = request.inputs()
            made = pb_utils.Tensor("out", tensor.as_numpy() * np.float32(2))
            answers.append(pb_utils.InferenceResponse(output_tensors=[made]))
        return answers
"""
CONFIG = """
name: "double"
backend: "python"
max_batch_size: 64
input {{ name: "in" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "out" data_type: TYPE_FP32 dims: 1 }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""
ENSEMBLE = """
name: "twice"
platform: "ensemble"
max_batch_size: 64
input { name: "weight" data_type: TYPE_FP32 dims: 1 }
output { name: "score" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step {
    model_name: "double" model_version: -1
    input_map { key: "in" value: "weight" } output_map { key: "out" value: "once" }
  }
  step {
    model_name: "double" model_version: -1
    input_map { key: "in" value: "once" } output_map { key: "out" value: "score" }
  }
}
"""


@contextmanager
def served(store: Store, release: Release) -> Iterator[tuple[Releases, str]]:
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    releases = Releases(folder, host=host, store=store)
    try:
        releases.start(release)
        wait_for(release.name, lambda: releases.state(release) == "ready", host, release.name)
        yield releases, releases.endpoint(release).http
    finally:
        for each in releases.running():
            host.kill(each.name)  # that it goes in peace is shown elsewhere
            releases.stop(each)
        host.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def test_bulk_scores_equal_the_served_ones(tmp_path: Path) -> None:
    trained = make_trained(tmp_path, "binary")
    store = Store(str(tmp_path / "store"))
    bundle = trained.export(store)
    release, rows = Release(model=bundle.model, version=bundle.version), flights(300)
    bulk = Scorer(bundle.path).answers(rows)["score"]
    schema = read_schema(Path(bundle.path))
    with served(store, release) as (releases, url):
        releases.verify(release)
        columns = to_wire(rows, schema)
        for size in (1, 100, 300):
            answer = predict(url, release.model, columns, schema, "http", release.version, batch_rows=size)
            np.testing.assert_allclose(answer["score"], bulk, rtol=0, atol=1e-6)


def test_a_blend_that_auto_found_answers_as_its_trained_members_do(tmp_path: Path) -> None:
    """From the table to Triton: candidates on two folds, one graph, and the scores that training gives."""
    auto = {"kind": "auto", "auto": {"trials": 3, "folds": 2}}
    spec = load_spec(small_spec(tmp_path, rows=600, model=auto, training={"seed": 3}))
    store = Store(str(tmp_path / "store"))
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=store)
    checkpoint = launcher.train(spec.model, spec.training, dataset, folder=tmp_path / "run")
    members = read_blend(Path(checkpoint.path))
    assert len(members) in (2, 4, 6)  # one to three candidates, from two folds

    test = read_split(dataset.path, "test").whole()
    num, cat = np.asarray(test.num), np.asarray(test.cat)
    margin = sum(weight * open_margins(place)(num, cat).astype(np.float64) for place, weight in members)
    trained = scores(np.asarray(margin, np.float32), "binary")
    assert auc(np.asarray(test.target), trained[:, 0]) == pytest.approx(checkpoint.metrics["test_auc"])

    bundle = export_model(spec, checkpoint, dataset, store=store, lineage={})
    release, schema = Release(model=bundle.model, version=bundle.version), read_schema(Path(bundle.path))
    rows = pq.read_table(tmp_path / "parcels.parquet").take(np.asarray(test.rows)).drop(["hours"])
    np.testing.assert_allclose(Scorer(bundle.path).answers(rows)["score"], trained, rtol=0, atol=1e-5)
    with served(store, release) as (releases, url):
        releases.verify(release)
        answer = predict(url, release.model, to_wire(rows, schema), schema, "http", release.version)
    np.testing.assert_allclose(answer["score"], trained, rtol=0, atol=1e-5)


def own_repository(folder: Path, factor: float = 4.0) -> Path:
    """An ensemble of one model, twice, with its own code; golden rows say what it must answer."""
    (folder / "double" / "1").mkdir(parents=True)
    (folder / "double" / "1" / "model.py").write_text(DOUBLE)
    (folder / "double" / "config.pbtxt").write_text(CONFIG.format())
    (folder / "twice" / "1").mkdir(parents=True)
    (folder / "twice" / "config.pbtxt").write_text(ENSEMBLE)
    column = InputColumn(name="weight", dtype="FP32", kind="float", null=NULL_OF_KIND["float"])
    outputs = (OutputTensor(name="score", dtype="FP32", dims=(1,)),)
    write_schema(folder, Schema(task="regression", inputs=(column,), outputs=outputs))
    weight = np.arange(10, dtype=np.float32)
    table = {"weight": weight, "score": weight * np.float32(factor), "row": np.arange(10)}
    pq.write_table(pa.table(table), folder / "golden.parquet")
    return folder


def test_a_team_s_own_repository_is_served_as_it_is_and_must_answer_its_golden_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    with pytest.raises(ExportFailed, match=r"code that Triton will run \(double/1/model.py\)"):
        import_repository(own_repository(tmp_path / "own"), store, name="weights")
    for factor, right in ((4.0, True), (5.0, False)):
        folder = own_repository(tmp_path / f"own-{factor}", factor)
        bundle = import_repository(folder, store, name="weights", with_code=True)
        release = Release(model=bundle.model, version=bundle.version)
        with served(store, release) as (releases, _):
            if right:
                releases.verify(release)
            else:
                with pytest.raises(VerificationFailed, match="2 of 3 rows differ in 'score'"):
                    releases.verify(release)
    assert store.versions("weights") == [1, 2]
    with pytest.raises(PredictionFailed, match="only a server can run"):
        Scorer(bundle.path)


def test_a_repository_that_is_not_what_its_schema_says_is_refused(tmp_path: Path) -> None:
    folder = own_repository(tmp_path / "own")
    config = folder / "twice" / "config.pbtxt"
    config.write_text(
        ENSEMBLE.replace('name: "weight" data_type: TYPE_FP32', 'name: "mass" data_type: TYPE_FP32')
    )
    with pytest.raises(ExportFailed, match=r"input '(mass|weight)' is .* in twice/config.pbtxt"):
        import_repository(folder, Store(str(tmp_path / "store")), name="weights", with_code=True)
    with pytest.raises(ExportFailed, match="which of"):
        import_repository(folder, Store(str(tmp_path / "store")), name="weights", entry="thrice")
