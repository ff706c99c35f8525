from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.commands.predictions import predict_in_bulk
from serin.errors import BundleBroken
from serin.export.explain.explainer import Explainer
from serin.export.score.predict import Scorer
from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.serving.triton.model_config import Settings, python_config
from serin.serving.triton.repository import build_repository, serving_settings
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA


def configured(schema: Schema = SCHEMA, *, threads: int = 1, **serving: int) -> model_config_pb2.ModelConfig:
    settings = Settings(
        release=Release(model=MODEL, version=7), serving=ServingSpec(**serving), threads=threads
    )
    return parse(python_config(schema, settings).text)


def parse(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_a_configuration_leaves_nothing_to_guess() -> None:
    config = configured(max_batch_rows=32, instances=2, threads=3)
    assert (config.name, config.backend, config.max_batch_size) == (MODEL, "python", 32)
    types = {
        tensor.name: (model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims))
        for tensor in config.input
    }
    assert types == {
        "carrier": ("TYPE_STRING", [1]),
        "temp": ("TYPE_FP32", [1]),
        "distance": ("TYPE_INT64", [1]),
        "night": ("TYPE_INT8", [1]),
    }
    assert [(tensor.name, list(tensor.dims)) for tensor in config.output] == [("score", [1])]
    assert list(config.version_policy.specific.versions) == [7]
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (2, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert config.parameters["ort_threads"].string_value == "3"
    assert [(sample.batch_size, set(sample.inputs)) for sample in config.model_warmup] == [
        (1, set(types)),
        (32, set(types)),
    ]


def test_requests_are_batched_without_a_queue_policy_which_makes_triton_sleep() -> None:
    config = configured()
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.HasField("default_queue_policy")


def test_any_column_name_survives() -> None:
    names = ['say "hi"', "back\\slash", "two\nlines", "größe 雪", "} backend: 'x'"]
    columns = tuple(InputColumn(name=name, dtype="FP32", kind="float", null="NaN") for name in names)
    outputs = (
        OutputTensor(name="label", dtype="INT64", dims=(1,)),
        OutputTensor(name="probabilities", dtype="FP32", dims=(4,)),
    )
    config = configured(replace(SCHEMA, inputs=columns, outputs=outputs))
    assert [tensor.name for tensor in config.input] == names
    assert [list(tensor.dims) for tensor in config.output] == [[1], [4]]


def test_a_repository_holds_one_version_of_one_model_read_only(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundles.publish(store, bias=0.0)
    bundle = bundles.publish(store, bias=1.0, spec="serving: {max_batch_rows: 8}\n")
    folder = build_repository(bundle, tmp_path / "releases" / "repository")
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    inside = f"{MODEL}/2"
    assert files == [
        f"{inside}/model.onnx",
        f"{inside}/model.py",
        f"{inside}/schema.json",
        f"{MODEL}/config.pbtxt",
        *(f"{MODEL}/warmup/{sample}-{column}.bin" for sample in range(2) for column in range(4)),
    ]
    assert parse((folder / MODEL / "config.pbtxt").read_text()).max_batch_size == 8
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.*")} == {0o444}
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["repository"]
    assert build_repository(bundle, folder) == folder


def test_a_repository_has_what_records_requests_only_where_the_spec_asks_for_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    shares = (0, 0.5)
    specs = [f"serving: {{}}\nmonitoring: {{capture: {{share: {share}}}}}\n" for share in shares]
    made = [bundles.publish(store, bias=0.0, spec=spec) for spec in specs]
    without, with_it = (
        build_repository(bundle, tmp_path / str(bundle.version) / "repository") / MODEL for bundle in made
    )
    code = {"recording.py", "spool_blocks.py", "spool_writer.py"}
    assert code & {path.name for path in (without / "1").iterdir()} == set()
    assert code <= {path.name for path in (with_it / "2").iterdir()}
    assert "record" not in (without / "config.pbtxt").read_text()
    said = parse((with_it / "config.pbtxt").read_text()).parameters
    assert float(said["record_share"].string_value) == 0.5
    header = json.loads(said["record_header"].string_value)
    assert (header["model"], header["release"], header["share"]) == (MODEL, f"{MODEL}-v2", 0.5)
    assert header["inputs"][0] == ["carrier", "string", [1]]
    assert header["outputs"] == [["score", "FP32", [1]]]


def test_what_a_baseline_records_has_its_own_name(tmp_path: Path) -> None:
    spec = "monitoring: {capture: {share: 1}}\n"
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=0.0, spec=spec)
    release = Release(model=MODEL, version=1, baseline=True)
    folder = build_repository(bundle, tmp_path / "repository", release=release)
    said = parse((folder / MODEL / "config.pbtxt").read_text()).parameters
    assert json.loads(said["record_header"].string_value)["release"] == f"{MODEL}-v1-baseline"


def test_a_bundle_that_was_changed_becomes_no_repository(tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=0.0)
    model = Path(bundle.path) / "model.onnx"
    model.write_bytes(bundles.graph(5.0).SerializeToString())
    with pytest.raises(BundleBroken, match="was changed"):
        build_repository(bundle, tmp_path / "releases" / "repository")
    assert not (tmp_path / "releases").exists() or not list((tmp_path / "releases").iterdir())


def test_a_manifest_that_was_replaced_after_its_signature_was_checked_is_refused(tmp_path: Path) -> None:
    checked = replace(bundles.publish(Store(str(tmp_path / "store")), bias=0.0), digest="0" * 64)
    folder, rows = Path(checked.path), tmp_path / "rows.csv"
    rows.write_text("carrier,temp,distance,night\nAA,1,2,true\n")
    for load in (
        lambda: build_repository(checked, tmp_path / "repository"),
        lambda: Scorer(folder, digest=checked.digest),
        lambda: Explainer(folder, digest=checked.digest),
        lambda: predict_in_bulk(checked, str(rows), None, workers=1, scheduler=None),
    ):
        with pytest.raises(BundleBroken, match="its manifest was changed while it was loaded"):
            load()


def test_a_bundle_without_a_spec_is_served_by_default(tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=0.0)
    assert serving_settings(bundle).request_timeout == 4.0
    (Path(bundle.path) / "spec.yaml").unlink()
    assert serving_settings(bundle) == ServingSpec()
    (Path(bundle.path) / "spec.yaml").write_text("serving: {p99_ms: never}")
    with pytest.raises(BundleBroken, match="serving section"):
        serving_settings(bundle)
