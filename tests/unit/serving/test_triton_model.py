from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from serin.serving.repository import build_repository
from serin.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL
from tests.unit.serving.fake_triton import InferenceRequest, Logger, TritonError, load_model


class Counting:
    """An ONNX Runtime session that counts its runs, and chokes on an infinite `temp` as a graph might."""

    def __init__(self, session: Any) -> None:
        self._session, self.batches = session, []

    def run(self, outputs: list[str], feed: dict[str, Any]) -> Any:
        self.batches.append(len(feed["temp"]))
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


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("carrier", np.array([[b"AA"], [b"\xff"]], dtype=object), "input 'carrier': row 1 is not UTF-8"),
        (
            "carrier",
            np.array([[b"\xed\xa0\x80"], [b""]], dtype=object),
            "input 'carrier': row 0 is not UTF-8",
        ),
        (
            "night",
            np.array([[0], [2]], dtype=np.int8),
            "input 'night': row 1 is 2; a bool is 0 or 1, or -1 for null",
        ),
    ],
)
def test_a_bad_value_fails_its_own_request_and_names_the_column(
    model: Any, column: str, values: Any, words: str
) -> None:
    good = InferenceRequest(bundles.rows(2))
    first, bad, last = model.execute([good, InferenceRequest({**bundles.rows(2), column: values}), good])
    assert (bad.error.message, bad.error.code) == (words, TritonError.INVALID_ARG)
    assert first.error is None
    assert np.array_equal(first.output_tensors[0].values, last.output_tensors[0].values)


def test_a_missing_column_is_named(model: Any) -> None:
    columns = bundles.rows(1)
    del columns["distance"]
    (response,) = model.execute([InferenceRequest(columns)])
    assert response.error.message == "input 'distance' is missing"


def test_a_request_the_graph_chokes_on_fails_alone_and_its_sender_learns_no_path(model: Any) -> None:
    bad = {**bundles.rows(2), "temp": np.array([[1.0], [np.inf]], dtype=np.float32)}
    Logger.lines.clear()
    first, second = model.execute([InferenceRequest(bundles.rows(2)), InferenceRequest(bad)])
    assert first.error is None
    assert second.error.code == TritonError.INTERNAL
    assert "/" not in second.error.message
    assert len(Logger.lines) == 1
    assert "/srv/secret" in Logger.lines[0], "whoever runs the server does learn it"


def test_letters_beyond_ascii_reach_the_graph_as_they_are(model: Any) -> None:
    columns = {**bundles.rows(1), "carrier": np.array([["Zürich 雪"]], dtype=object)}
    (response,) = model.execute([InferenceRequest(columns)])
    assert np.array_equal(response.output_tensors[0].values, bundles.score(model.folder, columns))


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
    one, two = loaded.execute(
        [InferenceRequest({"image": images[:1]}), InferenceRequest({"image": images[1:]})]
    )
    assert fed == [(3, 2, 3)]
    assert one.output_tensors[0].values.tolist() == [[15.0]]
    assert two.output_tensors[0].values.tolist() == [[51.0], [87.0]]
