"""The client, and every way of calling a model that docs/how-to/call-a-model.md shows, through a real gateway."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pandas as pd
import pytest
from google.protobuf import descriptor_pb2, json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from serin.errors import PredictionFailed, RowsUnfit
from serin.serving.client.client import Client, Protocol
from serin.serving.tuning.load import Closed, run_load
from tests.e2e.serving_guarded import guarded_gateway
from tests.e2e.serving_stack import NO_SUCH, Stack
from tests.kit.load import model_target
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "call-a-model.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
FRAME = pd.DataFrame(
    {"carrier": ["AA", None], "temp": [0.5, None], "distance": [1, 2], "night": [True, None]}
)
WIRE = {
    "carrier": np.array([["AA"], [""]], dtype=object), "temp": np.array([[0.5], [np.nan]], np.float32),
    "distance": np.array([[1], [2]], np.int64), "night": np.array([[1], [-1]], np.int8),
}  # fmt: skip


@pytest.fixture(scope="module")
def wanted(stack: Stack) -> Any:
    return bundles.score(stack.store.bundle(MODEL, stack.stable.version).path, WIRE)


def blocks(language: str, word: str) -> list[str]:
    found = [text for kind, text in BLOCKS if kind == language and word in text]
    assert found, f"{PAGE} shows nothing with {word}"
    return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_frame_and_dicts_get_the_scores_of_the_graph(stack: Stack, wanted: Any, protocol: Protocol) -> None:
    with Client(f"http://{stack.url}", MODEL, protocol=protocol) as model:
        assert np.array_equal(model.predict(FRAME)["score"], wanted)
        rows = [{"carrier": "AA", "temp": 0.5, "distance": 1, "night": True}, {"distance": 2}]
        assert np.array_equal(model.predict(rows)["score"], wanted)
        columns = {name: values.reshape(-1).tolist() for name, values in WIRE.items()}
        assert np.array_equal(model.predict(columns)["score"], wanted)
    with Client(stack.url, MODEL, protocol=protocol, batch_rows=1) as model:
        assert np.array_equal(model.predict(FRAME)["score"], wanted)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_version_that_is_named_answers_and_one_that_does_not_run_is_reported(
    stack: Stack, protocol: Protocol
) -> None:
    own = bundles.score(stack.store.bundle(MODEL, stack.candidate.version).path, WIRE)
    with Client(stack.url, MODEL, protocol=protocol, version=stack.candidate.version) as model:
        assert np.array_equal(model.predict(FRAME)["score"], own)
    with (
        Client(stack.url, MODEL, protocol=protocol, version=99) as model,
        pytest.raises(PredictionFailed, match=NO_SUCH),
    ):
        model.predict(FRAME)


def test_a_column_that_does_not_fit_is_named_before_it_is_sent(stack: Stack) -> None:
    with Client(stack.url, MODEL) as model:
        with pytest.raises(RowsUnfit, match="column 'distance' is missing"):
            model.predict(FRAME.drop(columns="distance"))
        with pytest.raises(RowsUnfit, match="column 'temp' has type"):
            model.predict(FRAME.assign(temp=["warm", "cold"]))


def test_a_key_and_custom_certificates_open_the_guarded_gateway(tmp_path: Path, wanted: Any) -> None:
    with guarded_gateway() as endpoint:
        url, key = f"https://{endpoint.stack.url}", endpoint.make_key("client")
        ca = tmp_path / "ca.pem"
        ca.write_bytes(endpoint.authority.certificate)
        protocols: list[Protocol] = ["http", "grpc"]
        for protocol in protocols:
            with Client(url, MODEL, protocol=protocol, ca=ca, api_key=key) as model:
                assert np.array_equal(model.predict(FRAME)["score"], wanted)
            with (
                Client(url, MODEL, protocol=protocol, ca=ca) as model,
                pytest.raises(PredictionFailed, match="a key is needed"),
            ):
                model.predict(FRAME)
            headers = {"authorization": f"Bearer {key}"}
            target = model_target(url, MODEL, WIRE, bundles.SCHEMA, protocol=protocol, headers=headers, ca=ca)
            result = run_load(target, Closed(clients=2), seconds=1.0)
            assert (result.failed, result.requests > 0) == (0, True)
        with Client(url, MODEL, retries=0) as model, pytest.raises(PredictionFailed, match="certificate"):
            model.predict(FRAME)


@pytest.mark.parametrize("number", range(2))
def test_the_python_on_the_page_runs(stack: Stack, wanted: Any, number: int) -> None:
    code = blocks("python", "delays")[number].replace("127.0.0.1:8080", stack.url)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert np.array_equal(names["scores"], wanted[: len(names["scores"])])
    if "over_grpc" in names:
        assert np.array_equal(names["over_grpc"], wanted)
        assert np.array_equal(names["again"], wanted[:1])


def test_curl_on_the_page_gets_the_same_score(stack: Stack, wanted: Any) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (block,) = blocks("bash", "curl -sf")
    answer = _run(block.replace("127.0.0.1:8080", stack.url), Path())
    assert json.loads(answer)["outputs"][0]["data"][0] == pytest.approx(float(wanted[0, 0]), abs=1e-6)


def test_fetch_on_the_page_gets_the_scores_of_rows_with_nulls(
    stack: Stack, wanted: Any, tmp_path: Path
) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (block,) = blocks("javascript", "fetch(")
    (tmp_path / "call.mjs").write_text(block.replace("127.0.0.1:8080", stack.url))
    assert json.loads(_run("node call.mjs", tmp_path)) == pytest.approx(wanted.ravel().tolist(), abs=1e-6)
    (tmp_path / "call.mjs").write_text(
        block.replace("127.0.0.1:8080", stack.url).replace("distance: 2,", "distance: 2.5,")
    )
    with pytest.raises(AssertionError, match=r"input 'distance', data\[1\]: 2\.5 is not an integer"):
        _run("node call.mjs", tmp_path)


def test_the_message_for_grpcurl_on_the_page_is_answered_with_the_same_score(
    stack: Stack, wanted: Any
) -> None:
    """As grpcurl does it: JSON becomes a message by the protocol's own rules, for the method that is named."""
    (block,) = blocks("bash", "grpcurl -plaintext")
    message, address, method = _grpcurl_arguments(block)
    asked = json_format.Parse(message, service_pb2.ModelInferRequest())
    assert address == "127.0.0.1:8080"
    with grpc.insecure_channel(stack.url) as channel:
        call = channel.unary_unary(
            f"/{method}",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        answer = call(asked, timeout=20)
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), wanted[0])


def test_grpcurl_itself_gets_an_answer(stack: Stack, tmp_path: Path) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not installed; its message is sent by the test above")
    files = descriptor_pb2.FileDescriptorSet()
    for described in (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR):
        described.CopyToProto(files.file.add())
    (tmp_path / "inference.protoset").write_bytes(files.SerializeToString())
    (block,) = blocks("bash", "grpcurl -plaintext")
    script = block.replace("-proto grpc_service.proto", "-protoset inference.protoset")
    assert "rawOutputContents" in _run(script.replace("127.0.0.1:8080", stack.url), tmp_path)


def _grpcurl_arguments(block: str) -> tuple[str, str, str]:
    words = shlex.split(block)
    return words[words.index("-d") + 1], words[-2], words[-1]


def _run(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
