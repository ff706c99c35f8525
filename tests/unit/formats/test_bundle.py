"""Bundles, datasets and their documents; what an older Serin stored is refused with advice."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import helper, numpy_helper
from pydantic import ValidationError

from serin.errors import BundleBroken, CheckpointBroken
from serin.formats.bundle import output_column, read_golden, read_manifest, verify_bundle, write_manifest
from serin.formats.dataset import (
    CategoricalColumn,
    DatasetDescription,
    LookupDescription,
    SourceFile,
    SplitDescription,
    read_dataset,
    write_dataset,
)
from serin.formats.gate import Runtime, read_runtime
from serin.formats.schema import (
    DTYPE_OF_KIND,
    Schema,
    Task,
    input_columns,
    outputs_of,
    read_schema,
    write_schema,
)
from serin.formats.statistics import CategoryStatistics, NumberStatistics, read_statistics, write_statistics
from serin.formats.trained import read_record
from serin.training.launch.job import read_job


def schema(task: Task = "binary", classes: tuple[str, ...] | None = None) -> Schema:
    entries = [{"name": kind, "kind": kind, "dtype": dtype} for kind, dtype in DTYPE_OF_KIND.items()]
    outputs = outputs_of(task, len(classes or ()))
    return Schema(task=task, inputs=input_columns(entries), outputs=outputs, classes=classes)


def tiny_model(weights: onnx.TensorProto | None = None, *, in_subgraph: bool = False) -> onnx.ModelProto:
    weights = weights or numpy_helper.from_array(np.ones(2, np.float32), "w")
    value = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    inner = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [value], [weights])
    if not in_subgraph:
        return helper.make_model(inner)
    flag = numpy_helper.from_array(np.array(True), "flag")
    node = helper.make_node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner)
    return helper.make_model(helper.make_graph([node], "outer", [], [value], [flag]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed bundle with a file of each sort that matters here."""
    bundle = tmp_path / "bundle"
    (bundle / "lookups").mkdir(parents=True)
    (bundle / "model.onnx").write_bytes(tiny_model().SerializeToString())
    (bundle / "lookups" / "planes.parquet").write_bytes(b"rows")
    (bundle / "card.md").write_text("# a model\n")
    write_schema(bundle, schema())
    seal(bundle)
    return bundle


def seal(bundle: Path) -> None:
    write_manifest(
        bundle,
        name="flights",
        model_version=3,
        spec_digest="ab",
        lineage={"run": "r1"},
        metrics={"test_auc": 0.7},
    )


def test_a_sealed_bundle_verifies_and_says_who_it_is(folder: Path) -> None:
    manifest = verify_bundle(folder)
    assert (manifest.name, manifest.model_version, manifest.spec_digest) == ("flights", 3, "ab")
    assert (manifest.lineage, manifest.metrics) == ({"run": "r1"}, {"test_auc": 0.7})
    assert sorted(manifest.files) == ["card.md", "lookups/planes.parquet", "model.onnx", "schema.json"]
    assert len(manifest.digest) == 64


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    left, right = one.read_bytes(), other.read_bytes()
    one.write_bytes(right)
    other.write_bytes(left)


def replace_by_link(path: Path) -> None:
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda b: flip(b / "model.onnx"), "model.onnx was changed"),
        (lambda b: flip(b / "lookups" / "planes.parquet"), "planes.parquet was changed"),
        (lambda b: (b / "card.md").write_text("# a longer text\n"), "card.md was changed"),
        (lambda b: swap(b / "card.md", b / "schema.json"), "was changed"),
        (lambda b: (b / "card.md").unlink(), "card.md is missing"),
        (lambda b: (b / "extra.py").write_text("import os"), "extra.py is not in the manifest"),
        (lambda b: (b / "lookups" / "extra").write_text(""), "lookups/extra is not in the manifest"),
        (lambda b: (b / "empty").mkdir(), "empty folder"),
        (lambda b: replace_by_link(b / "card.md"), "a link"),
        (lambda b: replace_by_link(b / "lookups"), "a link"),
        (lambda b: replace_by_link(b / "manifest.json"), "a link"),
        (lambda b: os.mkfifo(b / "pipe"), "no plain file"),
        (lambda b: (b / "a b").write_text(""), "not a valid name for a bundle's file"),
        (lambda b: (b / "manifest.json").unlink(), "No such file"),
        (lambda b: (b / "manifest.json").write_text("{"), "JSONDecodeError"),
        (lambda b: (b / "manifest.json").write_text("[]"), "not a serin.bundle document"),
    ],
)
def test_a_bundle_that_was_touched_is_refused(
    folder: Path, harm: Callable[[Path], object], reason: str
) -> None:
    harm(folder)
    with pytest.raises(BundleBroken, match=reason):
        verify_bundle(folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a//b", "./a", "a\\b", "", ".hidden", "a/b/c/d"]
)
def test_a_manifest_cannot_name_a_file_elsewhere(folder: Path, name: str) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    document["files"][name] = document["files"]["card.md"]
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(BundleBroken, match="not a valid name for a bundle's file"):
        verify_bundle(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "../x"), ("name", 7), ("model_version", 0), ("model_version", "1/../2"), ("format", "x")],
)
def test_a_manifest_with_an_impossible_identity_is_refused(folder: Path, key: str, value: object) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**document, key: value}))
    with pytest.raises(BundleBroken):
        read_manifest(folder)


def refer(folder: Path, *, in_subgraph: bool = False, **place: object) -> None:
    """Seals the bundle again with a model that keeps its weights in another file."""
    weights = numpy_helper.from_array(np.ones(2, np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in place.items():
        weights.external_data.add(key=key, value=str(value))
    (folder / "model.onnx").write_bytes(tiny_model(weights, in_subgraph=in_subgraph).SerializeToString())
    seal(folder)


@pytest.mark.parametrize("in_subgraph", [False, True])
@pytest.mark.parametrize(
    "location", ["../../secrets", "/etc/passwd", "lookups/../card.md", "lookups/planes.parquet", "none", ""]
)
def test_a_model_whose_weights_lie_elsewhere_is_refused(
    folder: Path, location: str, in_subgraph: bool
) -> None:
    refer(folder, in_subgraph=in_subgraph, location=location, offset=0, length=2)
    with pytest.raises(BundleBroken, match=f"'w' refers to '{location}', which is not a file of the bundle"):
        verify_bundle(folder)


@pytest.mark.parametrize(
    "place", [{"offset": 3, "length": 8}, {"offset": -4, "length": 8}, {"offset": 0}, {"length": "8 "}]
)
def test_a_model_that_refers_to_bytes_that_a_file_does_not_have_is_refused(
    folder: Path, place: dict[str, object]
) -> None:
    refer(folder, location="card.md", **place)
    with pytest.raises(BundleBroken, match=r"'w' refers to bytes that 'card\.md' does not have"):
        verify_bundle(folder)


def test_a_model_may_refer_to_a_file_of_the_bundle_beside_it(folder: Path) -> None:
    refer(folder, location="card.md", offset=2, length=8)
    assert (folder / "card.md").stat().st_size == 10
    verify_bundle(folder)


def test_a_model_that_is_not_onnx_is_refused(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"\xff\xff not a model")
    seal(folder)
    with pytest.raises(BundleBroken, match="not an ONNX model"):
        verify_bundle(folder)


def test_a_folder_with_a_link_cannot_be_sealed(folder: Path) -> None:
    replace_by_link(folder / "card.md")
    with pytest.raises(BundleBroken, match="a link"):
        seal(folder)


def test_golden_rows_come_back_as_they_travel_and_as_they_were_answered(tmp_path: Path) -> None:
    asked = schema("multiclass", ("a", "b", "c"))
    write_schema(tmp_path, asked)
    probabilities = np.array([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], np.float32)
    table = pa.table(
        {
            "string": ["x", ""],
            "float": pa.array([1.5, float("nan")], pa.float32()),
            "int": [1, -(2**63)],
            "timestamp": [0, -(2**63)],
            "bool": pa.array([1, -1], pa.int8()),
            "row": [10, 11],
            "label": output_column(np.array([[0], [2]])),
            "probabilities": output_column(probabilities),
        }
    )
    pq.write_table(table, tmp_path / "golden.parquet")
    golden = read_golden(tmp_path)
    assert golden.row.tolist() == [10, 11]
    assert {name: array.shape for name, array in golden.inputs.items()} == dict.fromkeys(
        DTYPE_OF_KIND, (2, 1)
    )
    assert golden.outputs["label"].tolist() == [[0], [2]]
    np.testing.assert_array_equal(golden.outputs["probabilities"], probabilities, strict=True)
    assert read_schema(tmp_path) == asked


def test_a_schema_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"format": "serin.schema", "version": 1, "task": "guess"}')
    with pytest.raises(BundleBroken, match=r"task: .*, not 'guess'"):
        read_schema(tmp_path)


DESCRIPTION = DatasetDescription(
    task="multiclass",
    target="grade",
    numeric=("x", "größe"),
    categorical=(CategoricalColumn(name="city", size=5),),
    classes=("bad", "good"),
    splits={"train": SplitDescription(rows=8, parts=1), "test": SplitDescription(rows=2, parts=1)},
    inputs=input_columns([{"name": "x", "kind": "float", "dtype": "FP32"}]),
    lookups=(
        LookupDescription(name="towns", key="city", columns={"size": "INT64"}, file="lookups/towns.parquet"),
    ),
    sources=(SourceFile(table="t", path="/data/t.parquet", size=3, modified="17"),),
    digest="ab" * 32,
    dropped={"null_target": 4},
)


def test_a_description_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_dataset(tmp_path, DESCRIPTION)
    assert read_dataset(tmp_path) == DESCRIPTION
    write_dataset(tmp_path, replace(DESCRIPTION, task="binary", classes=None))
    assert read_dataset(tmp_path).classes is None
    assert read_dataset(tmp_path).rows == {"train": 8, "test": 2}


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "x"}, {"task": "ranking"}, {"splits": None}])
def test_a_document_that_is_none_of_ours_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_dataset(tmp_path, DESCRIPTION)
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(BundleBroken, match=r"dataset\.json"):
        read_dataset(tmp_path)


def test_a_folder_without_a_description_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(BundleBroken, match="FileNotFoundError"):
        read_dataset(tmp_path)


COLUMNS = {
    "price": NumberStatistics(kind="float", rows=10, nulls=1, edges=(0.0, 1.5, 3.0), counts=(4, 5)),
    "city": CategoryStatistics(
        kind="string", rows=10, nulls=0, distinct=7, values=("Köln", "Pisa"), counts=(3, 2), others=5
    ),
}


def test_statistics_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_statistics(tmp_path / "statistics.json", COLUMNS)
    assert read_statistics(tmp_path / "statistics.json") == COLUMNS


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "statistics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BundleBroken, match=r"statistics\.json"):
        read_statistics(tmp_path / "statistics.json")


def test_a_bundle_says_how_it_is_run_and_one_that_says_nothing_runs_with_one_thread(tmp_path: Path) -> None:
    assert read_runtime(tmp_path) == Runtime(threads=1)
    (tmp_path / "gate.json").write_text(json.dumps({"passed": True}))
    assert read_runtime(tmp_path) == Runtime(threads=1)
    section = {"threads": 4, "mix_us": {"1": 9.0, "4": 5.0}, "spread": 0.001}
    (tmp_path / "gate.json").write_text(json.dumps({"runtime": section}))
    assert read_runtime(tmp_path) == Runtime(threads=4, mix_us={"1": 9.0, "4": 5.0}, spread=0.001)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"runtime": {"threads": 0}}', '{"runtime": {"threads": "two"}}']
)
def test_what_cannot_be_a_runtime_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "gate.json").write_text(text)
    with pytest.raises(BundleBroken):
        read_runtime(tmp_path)


MANIFEST = {
    "format": "serin.bundle", "version": 1, "name": "parcels", "model_version": 1, "spec_digest": "0" * 64,
    "lineage": {}, "metrics": {}, "files": {},
}  # fmt: skip
MODEL = {
    "format": "serin.weights", "version": 1, "model": {"kind": "mlp", "members": 2}, "task": "binary",
    "shape": {"numeric": 1, "sizes": [], "outputs": 1}, "file": "weights.safetensors", "weights_sha256": "0" * 64,
}  # fmt: skip
TRAINING = {
    "format": "serin.training", "version": 1, "model": {"kind": "mlp"}, "training": {"step": "captured"},
    "dataset": "/data", "dataset_digest": "0" * 64, "processes": 1, "gpu": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "document", "read", "refused", "problem"),
    [
        ("manifest.json", MANIFEST, read_manifest, BundleBroken, "not a serin.bundle document of version 2"),
        ("model.json", MODEL, read_record, CheckpointBroken, r"version\n  Input should be 2"),
        ("training.json", TRAINING, read_job, ValidationError, r"version\n  Input should be 2"),
    ],
    ids=["a bundle", "a trained model", "a training"],
)
def test_what_another_version_of_serin_wrote_is_refused(
    tmp_path: Path,
    name: str,
    document: dict[str, object],
    read: Callable[[Path], object],
    refused: type[Exception],
    problem: str,
) -> None:
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(refused, match=problem):
        read(tmp_path)
