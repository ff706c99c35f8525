"""A gateway with a key for one of two models, before a server that reads every request as protobuf does."""

import http.client
import json
import random
import shutil
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.keys import KeyFile
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_gateway import Http2
from tests.e2e.fuzz_messages import OTHER, drawn_messages, written
from tests.e2e.fuzz_messages import Field as WireField
from tests.e2e.fuzz_requests import GrpcCall, framed
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import start_gateway
from tests.kit.web import Handler, WebServer
from tests.unit.serving.bundles import MODEL

_METHODS = {
    "ModelInfer": service_pb2.ModelInferRequest,
    "ModelReady": service_pb2.ModelReadyRequest,
    "ModelMetadata": service_pb2.ModelMetadataRequest,
}


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers with what it was asked for: the model and the version in the message, and what the gateway read."""

    def service(self, details: Any) -> Any:
        headers = dict(details.invocation_metadata)
        kind = _METHODS[details.method.rpartition("/")[2]]

        def answer(message: bytes, _: object) -> bytes:
            try:
                parsed = kind.FromString(message)
            except DecodeError:
                return json.dumps(["unreadable"] * 2).encode()
            seen = headers.get("x-serin-model", ""), headers.get("x-serin-version", "")
            return json.dumps([_names(parsed), seen]).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


def _names(parsed: Any) -> tuple[str, str]:
    if isinstance(parsed, service_pb2.ModelInferRequest):
        return parsed.model_name, parsed.model_version
    return parsed.name, parsed.version


class _Web(Handler):
    """Answers with the path that it was asked for."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_POST(self) -> None:
        self.read_body()
        self.answer(self.path.encode())

    do_GET = do_POST  # noqa: N815


@dataclass(slots=True)
class Smuggled:
    """What became of calls with a key for MODEL alone: by status, and the answers that were for another model."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Guarded:
    port: int
    key: str

    def call(self, frame: bytes, method: str = "ModelInfer") -> tuple[str, Any]:
        """gRPC's status, and what the server was asked for where it answered."""
        return self._call(Http2(self.port), frame, method)

    def _call(self, wire: Http2, frame: bytes, method: str) -> tuple[str, Any]:
        headers = {
            "content-type": "application/grpc",
            "te": "trailers",
            "authorization": f"Bearer {self.key}",
        }
        status, text = wire.call(GrpcCall(f"{SERVICE}/{method}", frame, headers))
        return status, json.loads(wire.data[5:]) if status == "0" else text

    def smuggle(self, number: int, count: int) -> Smuggled:
        """Sends `count` drawn messages; with the same `number` the same ones."""
        draw, found, wire = random.Random(number), Smuggled(), Http2(self.port)
        try:
            for message in drawn_messages(number, count):
                frame, method = _frame(draw, message), draw.choice(["ModelInfer", *_METHODS])
                status, answer = self._call(wire, frame, method)
                found.statuses[status] += 1
                if status == "0" and (answer[0] != answer[1] or answer[0][0] != MODEL):
                    found.wrong.append(
                        f"{method} {frame.hex()}: the server read {answer[0]}, the gateway {answer[1]}"
                    )
                if status not in ("0", "3", "5", "7", "12"):
                    found.wrong.append(f"{method} {frame.hex()}: {status} {answer}")
        finally:
            wire.close()
        return found

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        """HTTP with the path exactly as given."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as wire:
            wire.putrequest(method, path, skip_host="host" in headers)
            given = {"authorization": f"Bearer {self.key}", "content-length": "2", **headers}
            for name, value in given.items():
                wire.putheader(name.replace("_", "-"), value)
            wire.endheaders(b"{}")
            answer = wire.getresponse()
            return answer.status, answer.read().decode()


def _frame(draw: random.Random, message: bytes) -> bytes:
    """Mostly one frame as it should be; else with a wrong length, a flag, a second frame or something behind it."""
    other = written([WireField(1, 2, OTHER.encode())])
    match draw.randrange(24):
        case 0:
            return framed(message) + framed(other)
        case 1:
            return framed(message) + other
        case 2:
            return b"\0" + struct.pack(">I", len(message) + draw.choice([-1, 1, 9]) & 0xFFFFFFFF) + message
        case 3:
            return b"\1" + framed(message)[1:]
        case 4:
            return framed(b"") + framed(message)
        case _:
            return framed(message)


@contextmanager
def guarded() -> Iterator[Guarded]:
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    web = WebServer(_Web)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    calls = grpc.server(futures.ThreadPoolExecutor(2), handlers=[_Calls()])
    place = Endpoint(
        http=f"127.0.0.1:{web.server_port}", grpc=f"127.0.0.1:{calls.add_insecure_port('127.0.0.1:0')}"
    )
    calls.start()
    try:
        _, key = KeyFile(path=folder / "keys.json").create("one", models=[MODEL])
        gateway, port = start_gateway(folder, host)
        releases = [Release(model=name, version=1) for name in (MODEL, OTHER)]
        gateway.keys.follow()
        gateway.apply(
            [ModelRoute(model=each.model, epoch=1, stable=each) for each in releases],
            {each.name: place for each in releases},
        )
        endpoint = Guarded(port, key)
        good = framed(written([WireField(1, 2, MODEL.encode())]))
        wait_for("the route", lambda: endpoint.call(good)[0] == "0", host)
        yield endpoint
    finally:
        host.kill(PROCESS_NAME)
        web.shutdown()
        web.server_close()
        calls.stop(None).wait()
        shutil.rmtree(folder, ignore_errors=True)
