"""Which failures are the client's: what the server says of a request itself, and nothing that a model says."""

import http.client
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from serin.machine.ports import free_ports
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import new_place, reclaim_shared_memory, triton_process
from serin.store.artifacts import ModelRoute, Release
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway

OURS = Release(model="ours", version=1)
CONFIG = """
name: "ours"
backend: "python"
input [{ name: "number" data_type: TYPE_FP32 dims: 1 }, { name: "error" data_type: TYPE_STRING dims: 1 }]
output { name: "score" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        error = pb_utils.get_input_tensor_by_name(request, "error").as_numpy()[0].decode()
        if error.startswith("raised: "):
            raise pb_utils.TritonModelException(error)
        if error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(error))
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("score", np.zeros(1, np.float32))])
"""


@dataclass(frozen=True, slots=True)
class Served:
    port: int

    def post(self, body: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as wire:
            wire.request("POST", f"/v2/models/{OURS.model}/infer", body)
            answer = wire.getresponse()
            return answer.status, answer.read().decode()

    def call(self, error: str) -> str:
        message = service_pb2.ModelInferRequest(model_name=OURS.model)
        number = message.inputs.add(name="number", datatype="FP32", shape=[1])
        number.contents.fp32_contents.append(1.0)
        message.inputs.add(name="error", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            error.encode()
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                channel.unary_unary(f"{SERVICE}/ModelInfer")(message.SerializeToString(), timeout=20)
            except grpc.RpcError as refused:
                return f"{refused.code().name}: {refused.details()}"
        return "OK"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A team's own model, which fails with the text that it is given, on a real Triton behind the gateway."""
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    code = folder / "repository" / OURS.model / "1" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text(CODE)
    (code.parents[1] / "config.pbtxt").write_text(CONFIG)
    first, second, third = free_ports(3)
    place = new_place(OURS, (first, second, third))
    with ExitStack() as exits:
        gateway, port, host = exits.enter_context(lone_gateway())
        exits.callback(shutil.rmtree, folder)
        exits.callback(reclaim_shared_memory, place)
        exits.callback(host.kill, OURS.name)
        host.start(triton_process(find_triton(), OURS, folder / "repository", place, folder / "triton.log"))
        gateway.apply([ModelRoute(model=OURS.model, epoch=1, stable=OURS)], {OURS.name: place.endpoint})
        here = Served(port)
        wait_for("Triton", lambda: here.post(request())[0] == 200, host, OURS.name, PROCESS_NAME)
        yield here


def request(error: str = "", change: Callable[[dict[str, Any]], object] = lambda _: None) -> str:
    body: dict[str, Any] = {
        "inputs": [
            {"name": "number", "datatype": "FP32", "shape": [1], "data": [1.0]},
            {"name": "error", "datatype": "BYTES", "shape": [1], "data": [error]},
        ]
    }
    change(body)
    return json.dumps(body)


SAID_BY_A_MODEL = [
    "failed to get the row",
    "attempt to access a closed file",
    "attempt to divide by zero",
    "Unable to parse request",
    "Unable to parse 'data': attempt to access JSON non-number as double",
    "failed to parse the request JSON buffer: Invalid value. at 0",
    "raised: Unable to parse 'data': attempt to access JSON non-number as double",
]


@pytest.mark.parametrize("error", SAID_BY_A_MODEL)
def test_what_a_model_says_is_the_servers_failure_whatever_it_says(served: Served, error: str) -> None:
    status, text = served.post(request(error))
    assert (status, error in text) == (500, True)
    answer = served.call(error)
    assert answer.startswith("INTERNAL: ")
    assert error in answer


def _input(**changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["inputs"][0].update(changed)


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "inputs": lambda body: body.update(inputs=3),
    "no inputs": lambda body: body.pop("inputs"),
    "an input": lambda body: body["inputs"].append(3),
    "no name": lambda body: body["inputs"][0].pop("name"),
    "name": _input(name=3),
    "no type": lambda body: body["inputs"][0].pop("datatype"),
    "type": _input(datatype=3),
    "no shape": lambda body: body["inputs"][0].pop("shape"),
    "shape": _input(shape="x"),
    "size": _input(shape=[1.5]),
    "data": _input(data={}),
    "word for a number": _input(data=["x"]),
    "object for a number": _input(data=[{}]),
    "too much data": _input(data=[1, 2]),
    "number for a text": lambda body: body["inputs"][1].update(data=[3]),
    "id": lambda body: body.update(id=[]),
    "outputs": lambda body: body.update(outputs=3),
    "output": lambda body: body.update(outputs=[{}]),
    "classes": lambda body: body.update(outputs=[{"name": "score", "parameters": {"classification": "x"}}]),
    "binary": lambda body: body.update(outputs=[{"name": "score", "parameters": {"binary_data": "x"}}]),
    "parameters": lambda body: body.update(parameters=3),
    "priority": lambda body: body.update(parameters={"priority": "x"}),
    "sequence": lambda body: body.update(parameters={"sequence_start": 3}),
}


def test_what_the_server_says_of_a_request_is_the_clients_fault(served: Served) -> None:
    bodies = {name: request(change=change) for name, change in MALFORMED.items()}
    bodies |= {
        "not JSON": "{",
        "more than JSON": request() + "x",
        "a number": request()[:-1] + ', "id": 1' + "0" * 400 + "}",
    }
    answers = {name: served.post(body) for name, body in bodies.items()}
    assert {name: answer for name, answer in answers.items() if answer[0] != 400} == {}
    assert served.post(request(change=_input(data=[None])))[0] == 200, "null is no fault"
