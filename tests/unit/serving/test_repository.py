"""A release's model repository, and the model that Triton's Python backend runs from it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from tritonclient.grpc import model_config_pb2

from serin.commands.predictions import predict_in_bulk
from serin.errors import BundleBroken
from serin.formats.schema import InputColumn, OutputTensor, Schema, read_schema
from serin.scoring.explain.explainer import Explainer
from serin.scoring.predict import Scorer
from serin.serving.triton.model_config import Settings, python_config
from serin.serving.triton.repository import build_repository, serving_settings
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA
from tests.unit.serving.fake_triton import InferenceRequest, Logger, TritonError, load_model


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
        lambda: predict_in_bulk(checked, str(rows), None, scheduler=None),
    ):
        with pytest.raises(BundleBroken, match="its manifest was changed while it was loaded"):
            load()


def test_a_bundle_without_a_spec_is_served_by_default(tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=0.0)
    assert serving_settings(bundle).request_timeout == 4.0
    (Path(bundle.path) / "spec.yaml").unlink()
    assert serving_settings(bundle) == ServingSpec()
    (Path(bundle.path) / "spec.yaml").write_text("serving: {instances: never}")
    with pytest.raises(BundleBroken, match="serving section"):
        serving_settings(bundle)


class Counting:
    """An ONNX Runtime session that counts its runs, and chokes on an infinite `temp` as a graph might."""

    def __init__(self, session: Any, fed: list[dict[str, Any]] | None = None) -> None:
        self._session, self.batches, self._fed = session, [], fed

    def run(self, outputs: list[str], feed: dict[str, Any]) -> Any:
        self.batches.append(len(feed["temp"]))
        if self._fed is not None:
            self._fed.append(feed)
        if np.isinf(feed["temp"]).any():
            raise Fail("node Sum in /srv/secret/model.onnx did not like it")
        return self._session.run(outputs, feed)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=-1.0)
    repository = build_repository(bundle, tmp_path / "repository")
    loaded = load_model(repository / MODEL, bundle.version)
    loaded._session = Counting(loaded._session)
    loaded.folder = bundle.path
    return loaded


def test_requests_of_a_batch_share_one_run_and_get_their_own_rows(model: Any) -> None:
    requests = [InferenceRequest(bundles.rows(count, seed=count)) for count in (1, 3, 2)]
    responses = model.execute(requests)
    assert model._session.batches == [6]
    for request, response in zip(requests, responses, strict=True):
        (tensor,) = response.output_tensors
        assert np.array_equal(tensor.values, bundles.score(model.folder, request.columns))


ASKS = "the model asks for [rows, 1]"
NO_BOOL = "a bool is 0 or 1, or -1 for null"
LONG = "input 'carrier': row 1 has 70000 bytes; at most 65536 are taken"
MALFORMED: dict[str, tuple[str, Any, str]] = {
    "type": ("temp", np.zeros((2, 1), np.float64), "input 'temp' holds float64, the model asks for float32"),
    "form": ("temp", np.zeros((2, 3), np.float32), f"input 'temp' has shape [2, 3], {ASKS}"),
    "dimensions": ("distance", np.zeros(2, np.int64), f"input 'distance' has shape [2], {ASKS}"),
    "rows": ("distance", np.zeros((3, 1), np.int64), "input 'distance' has 3 rows, input 'carrier' has 2"),
    "missing": ("distance", None, "input 'distance' is missing"),
    "long": ("carrier", np.array([[b"AA"], [b"x" * 70_000]], object), LONG),
    "not UTF-8": ("carrier", np.array([[b"\xc3"], [b"\xa9"]], object), "input 'carrier': row 0 is not UTF-8"),
    "second row": ("carrier", np.array([[b"AA"], [b"\xff"]], object), "input 'carrier': row 1 is not UTF-8"),
    "surrogate": (
        "carrier",
        np.array([[b"\xed\xa0\x80"], [b""]], object),
        "input 'carrier': row 0 is not UTF-8",
    ),
    "bool": ("night", np.array([[1], [-2]], np.int8), f"input 'night': row 1 is -2; {NO_BOOL}"),
    "large bool": ("night", np.array([[0], [2]], np.int8), f"input 'night': row 1 is 2; {NO_BOOL}"),
}


def malformed(kind: str) -> InferenceRequest:
    column, values, _ = MALFORMED[kind]
    columns = {**bundles.rows(2), column: values}
    return InferenceRequest({name: held for name, held in columns.items() if held is not None})


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_request_gets_its_error_and_its_neighbours_are_scored_in_one_run(
    model: Any, kind: str
) -> None:
    good = [InferenceRequest(bundles.rows(count, seed=count)) for count in (2, 1, 3)]
    first, bad, second, third = model.execute([good[0], malformed(kind), *good[1:]])
    assert (bad.error.message, bad.error.code) == (MALFORMED[kind][2], TritonError.INVALID_ARG)
    assert model._session.batches == [6]
    for request, response in zip(good, (first, second, third), strict=True):
        assert np.array_equal(response.output_tensors[0].values, bundles.score(model.folder, request.columns))


def test_every_malformed_request_in_one_batch_gets_its_own_error(model: Any) -> None:
    good = InferenceRequest(bundles.rows(2))
    responses = model.execute([good, *map(malformed, MALFORMED), good])
    told = [response.error.message for response in responses[1:-1]]
    assert told == [words for _, _, words in MALFORMED.values()]
    assert np.array_equal(responses[0].output_tensors[0].values, responses[-1].output_tensors[0].values)
    assert not any(mark in words for words in told for mark in ("/", "Traceback", ".py"))


def test_columns_may_come_in_any_order(model: Any) -> None:
    columns = bundles.rows(3)
    turned = dict(reversed(columns.items()))
    one, other = model.execute([InferenceRequest(columns), InferenceRequest(turned)])
    assert np.array_equal(one.output_tensors[0].values, other.output_tensors[0].values)


def test_a_text_may_hold_any_character(model: Any) -> None:
    texts = ["A\0A", "\0", "", "AA\0", "AA", "\U0001f426"]
    columns = {**bundles.rows(6), "carrier": np.array(texts, dtype=object).reshape(-1, 1)}
    fed = []
    model._session = Counting(model._session._session, fed)
    model.execute([InferenceRequest(columns)])
    assert fed[0]["carrier"].reshape(-1).tolist() == texts


def test_of_many_requests_one_that_the_graph_chokes_on_costs_few_runs(model: Any) -> None:
    bad = {**bundles.rows(1), "temp": np.array([[np.inf]], dtype=np.float32)}
    requests = [InferenceRequest(bundles.rows(1)) for _ in range(15)]
    responses = model.execute([*requests[:9], InferenceRequest(bad), *requests[9:]])
    assert [at for at, response in enumerate(responses) if response.error] == [9]
    assert len(model._session.batches) == 9, "16, both halves of 16, of 8, of 4 and of 2"


def test_a_front_and_a_core_answer_as_the_whole_graph_does(tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=-1.0, in_two=True)
    folder, schema = Path(bundle.path), read_schema(Path(bundle.path))
    release = Release(model=MODEL, version=bundle.version)
    settings = Settings(release=release, serving=ServingSpec())
    place = tmp_path / MODEL / str(bundle.version)
    place.mkdir(parents=True)
    for name in ("front.onnx", "core.onnx", "schema.json"):
        shutil.copyfile(folder / name, place / name)
    config = python_config(schema, settings, graphs=("front.onnx", "core.onnx"))
    (place.parent / "config.pbtxt").write_text(config.text)
    model = load_model(place.parent, bundle.version)
    model._session._core._bound = True  # as on a GPU; here what is bound lies in the same memory
    columns = bundles.rows(9)
    (response,) = model.execute([InferenceRequest(columns)])
    np.testing.assert_allclose(response.output_tensors[0].values, bundles.score(folder, columns), rtol=1e-6)


def test_a_request_the_graph_chokes_on_fails_alone_and_its_sender_learns_no_path(model: Any) -> None:
    bad = {**bundles.rows(2), "temp": np.array([[1.0], [np.inf]], dtype=np.float32)}
    Logger.lines.clear()
    first, second = model.execute([InferenceRequest(bundles.rows(2)), InferenceRequest(bad)])
    assert first.error is None
    assert second.error.code == TritonError.INTERNAL
    assert "/" not in second.error.message
    assert len(Logger.lines) == 1
    assert "/srv/secret" in Logger.lines[0], "whoever runs the server does learn it"


def test_arrays_reach_the_graph_in_their_form_and_are_given_back_row_by_row(tmp_path: Path) -> None:
    bundle = bundles.publish(Store(str(tmp_path / "store")), bias=-1.0)
    repository = build_repository(bundle, tmp_path / "repository")
    schema = repository / MODEL / str(bundle.version) / "schema.json"
    schema.chmod(0o644)
    asked = {
        "name": "image",
        "kind": "float",
        "dtype": "FP32",
        "dims": [2, 3],
        "source": "request",
        "null": "NaN",
    }
    schema.write_text(json.dumps({**json.loads(schema.read_text()), "inputs": [asked]}))
    loaded = load_model(repository / MODEL, bundle.version)
    fed = []

    class Summing:
        def run(self, _outputs: list[str], feed: dict[str, Any]) -> Any:
            fed.append(feed["image"].shape)
            return [feed["image"].sum(axis=(1, 2), keepdims=False).reshape(-1, 1)]

    loaded._session = Summing()
    images = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    one, two = loaded.execute([InferenceRequest({"image": part}) for part in (images[:1], images[1:])])
    assert fed == [(3, 2, 3)]
    assert one.output_tensors[0].values.tolist() == [[15.0]]
    assert two.output_tensors[0].values.tolist() == [[51.0], [87.0]]
