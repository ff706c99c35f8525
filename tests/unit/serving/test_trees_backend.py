"""Trees for FIL: the front beside them gives the rows that XGBoost itself would be given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import xgboost
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.export.build import export_model
from serin.export.session import open_session
from serin.formats.bundle import read_golden, verify_bundle
from serin.formats.shards import read_split
from serin.formats.trained import write_trained
from serin.models.trees import column_types, joined
from serin.serving.triton.backends import Server
from serin.serving.triton.repository import build_repository
from serin.store.store import Store
from tests.unit.export.small_dataset import Trained, make_trained

SERVER = Server(backends=frozenset({"fil", "onnxruntime"}))


def with_trees(folder: Path) -> Trained:
    """The small dataset's training, had it been XGBoost's."""
    trained = make_trained(folder, "binary", export={"target": "gpu"})
    shape = json.loads((folder / "result" / "model.json").read_text())["shape"]
    rows = read_split(folder / "dataset", "train")
    num, cat, target = (np.concatenate(list(part)) for part in (rows.num, rows.cat, rows.target))
    table = xgboost.DMatrix(
        joined(num, cat), target, feature_types=column_types(shape["numeric"], shape["sizes"]),
        enable_categorical=True,
    )  # fmt: skip
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1}, table, 5)
    result = folder / "trees"
    result.mkdir()
    record = {"model": {"kind": "xgboost"}, "shape": shape, "task": "binary", "file": "trees.ubj"}
    write_trained(result, bytes(booster.save_raw("ubj")), record)
    checkpoint = replace(trained.checkpoint, path=str(result))
    return replace(trained, checkpoint=checkpoint)


def test_an_exported_forest_is_served_by_fil_from_rows_that_xgboost_scores_as_the_gate_did(
    tmp_path: Path,
) -> None:
    trained = with_trees(tmp_path)
    store = Store(str(tmp_path / "store"))
    bundle = export_model(trained.spec, trained.checkpoint, trained.dataset, store=store, lineage={})
    assert "trees.ubj" in verify_bundle(Path(bundle.path)).files

    serving = trained.spec.serving.model_copy(update={"backend": "fil"})
    folder = build_repository(bundle, tmp_path / "repository", server=SERVER, serving=serving)

    core = folder / f"{bundle.model}_core"
    config = text_format.Parse((core / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    front = open_session(folder / f"{bundle.model}_front" / str(bundle.version) / "model.onnx")
    golden = read_golden(Path(bundle.path))
    (rows,) = front.run([front.get_outputs()[0].name], golden.inputs)
    assert list(config.input[0].dims) == [rows.shape[1]]
    booster = xgboost.Booster(model_file=str(core / str(bundle.version) / config.default_model_filename))
    table = xgboost.DMatrix(rows, feature_types=booster.feature_types, enable_categorical=True)
    scores = booster.predict(table).reshape(-1, 1)
    print("largest difference from the golden scores", np.abs(scores - golden.outputs["score"]).max())
    np.testing.assert_allclose(scores, golden.outputs["score"], rtol=1e-5, atol=1e-6)
