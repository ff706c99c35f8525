"""Models with inputs of their own, from an ONNX file to a published version that answers."""

from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper

from serin.errors import ChampionRefused, GateFailed, ModelUnfit, RowsUnfit, SpecError
from serin.export.build import export_model
from serin.scoring.predict import Scorer
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import NO_DATASET, Checkpoint
from serin.store.store import Store
from serin.training.foreign.take_over import take_over
from tests.unit.training.runs import job_of

RANDOM = np.random.default_rng(3)
WEIGHTS = RANDOM.normal(size=(12, 3)).astype(np.float32)
IMAGES = RANDOM.normal(size=(20, 3, 4)).astype(np.float32)


def chances(images: np.ndarray) -> np.ndarray:
    raised = np.exp(images.reshape(-1, 12) @ WEIGHTS)
    return raised / raised.sum(axis=1, keepdims=True)


def picture_model(batch: object = "n", element: int = TensorProto.FLOAT) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["float"], ["row"], axis=1),
        helper.make_node("MatMul", ["row", "w"], ["answer"]),
    ]
    given = helper.make_tensor_value_info("image", element, [batch, 3, 4])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, [batch, 3])
    graph = helper.make_graph(nodes, "g", [given], [answer], [numpy_helper.from_array(WEIGHTS, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def spec_in(folder: Path, model: onnx.ModelProto, **golden: np.ndarray) -> PipelineSpec:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "rows.npz", **(golden or {"image": IMAGES, "probabilities": chances(IMAGES)}))
    given = {"onnx": str(folder / "m.onnx"), "golden": str(folder / "rows.npz"), "task": "multiclass"}
    return load_spec({"name": "pictures", "model": given})


def taken_over(spec: PipelineSpec, folder: Path, metrics: dict[str, float] | None = None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    take_over(job_of(spec.model, spec.training, NO_DATASET), folder)
    return Checkpoint(path=str(folder / "result"), step=0, metrics=metrics or {})


def test_an_onnx_file_without_data_becomes_a_version_that_answers_arrays(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "own", picture_model())
    checkpoint = taken_over(spec, tmp_path / "run")

    bundle = export_model(spec, checkpoint, NO_DATASET, store=Store(str(tmp_path / "store")), lineage={})
    scorer = Scorer(bundle.path)
    found = scorer.answers(pa.table({"image": IMAGES.reshape(20, 12).tolist()}))
    nested = scorer.answers(pa.table({"image": IMAGES.tolist()}))

    assert found["probabilities"] == pytest.approx(chances(IMAGES), abs=1e-5)
    assert (nested["label"] == found["label"]).all()
    assert (found["label"][:, 0] == chances(IMAGES).argmax(axis=1)).all()
    assert scorer.schema.inputs[0].dims == (3, 4)
    assert "3, 4" in Path(bundle.path, "card.md").read_text()
    with pytest.raises(RowsUnfit, match=r"holds 5 values in a row, the model asks for 12 \(3x4\)"):
        scorer.answers(pa.table({"image": [[1.0] * 5]}))
    with pytest.raises(RowsUnfit, match="different sizes"):
        scorer.answers(pa.table({"image": [[1.0] * 12, [1.0]]}))


def test_a_mask_that_names_no_input_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    spec, store = spec_in(tmp_path / "own", picture_model()), Store(str(tmp_path / "store"))
    wrong = load_spec({**spec.model_dump(mode="json"), "monitoring": {"capture": {"mask": ["picture"]}}})
    with pytest.raises(SpecError, match=r"monitoring.capture.mask: 'picture' is not .*; known: image"):
        export_model(wrong, taken_over(spec, tmp_path / "run"), NO_DATASET, store=store, lineage={})
    assert store.versions("pictures") == []


def test_answers_that_are_not_its_makers_do_not_pass_the_gate(tmp_path: Path) -> None:
    wrong = chances(IMAGES)
    wrong[7, 1] += 0.01
    spec = spec_in(tmp_path / "own", picture_model(), image=IMAGES, probabilities=wrong)

    with pytest.raises(GateFailed, match=r"differs from model.onnx in 1 of .*, first in row 7"):
        export_model(
            spec, taken_over(spec, tmp_path / "run"), NO_DATASET, store=Store(str(tmp_path / "s")), lineage={}
        )


def test_a_version_whose_reported_metric_is_worse_is_refused_until_somebody_answers_for_it(
    tmp_path: Path,
) -> None:
    spec, store = spec_in(tmp_path / "own", picture_model()), Store(str(tmp_path / "store"))
    good = taken_over(spec, tmp_path / "run", {"test_accuracy": 0.9})
    bundle = export_model(spec, good, NO_DATASET, store=store, lineage={})
    store.set_alias("pictures", "live", bundle.version)

    for metrics, words in (({"test_accuracy": 0.8}, "0.8, version 1 reported 0.9"), ({}, "cannot be judged")):
        worse = Checkpoint(path=good.path, step=0, metrics=metrics)
        with pytest.raises(ChampionRefused, match=words):
            export_model(spec, worse, NO_DATASET, store=store, lineage={})
    second = export_model(spec, worse, NO_DATASET, store=store, lineage={}, approved_by="ada")

    assert second.version == 2


@pytest.mark.parametrize(
    ("model", "golden", "words"),
    [
        (picture_model(batch=8), {}, "must begin with a free batch dimension"),
        (picture_model(element=TensorProto.UINT8), {}, "image is uint8; a request can have float32"),
        (picture_model(), {"pixels": IMAGES}, "lacks 'image'; it has pixels"),
        (picture_model(), {"image": IMAGES[:, :2]}, "expected rows of 3x4"),
        (picture_model(), {"image": IMAGES[:0]}, "at least one"),
    ],
    ids=["batch", "type", "golden names", "golden form", "no golden rows"],
)
def test_what_no_request_can_be_made_for_is_refused(
    tmp_path: Path, model: onnx.ModelProto, golden: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(ModelUnfit, match=words):
        taken_over(spec_in(tmp_path / "own", model, **golden), tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": {"onnx": "m.onnx", "task": "binary"}}, "model.golden: is missing"),
        ({"model": {"script": "t.py"}}, "model.task: is missing"),
        ({"model": {"kind": "mlp"}}, "data: is missing; add it, or bring a model"),
        ({"model": {"script": "t.py", "task": "binary"}, "features": [{"columns": ["a"], "steps": ["normalize"]}]},
         "features: are made of data"),
        ({"model": {"script": "t.py", "task": "binary", "classes": ["a", "b"]}}, "say task: multiclass too"),
        ({"model": {"script": "t.py", "onnx": "m.onnx"}}, "it needs no kind"),
        ({"model": {"kind": "xgboost", "options": {"max_dept": 3}}}, "no setting of XGBoost's trees; did you mean"),
        ({"model": {"kind": "xgboost", "hidden": [3]}}, "model.hidden: model.kind xgboost does not use it"),
        ({"model": {"kind": "mlp", "rounds": 3}}, "model.rounds: model.kind mlp does not use it: set training.epochs"),
    ],
)  # fmt: skip
def test_a_model_source_that_does_not_fit_is_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec({"name": "pictures", **given})


def test_a_spec_without_data_survives_its_own_yaml(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, picture_model())
    path = tmp_path / "spec.yaml"
    path.write_text(spec.to_yaml())

    assert load_spec(path) == spec
    assert load_spec(path).digest() == spec.digest()
