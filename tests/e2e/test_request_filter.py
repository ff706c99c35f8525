"""The compiled filter and the script that stands in for it say the same of every request, and let the same pass on."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.routes import Timeouts
from serin.serving.triton.installation import find_request_filter
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.lua_in_envoy import lua_reader
from tests.e2e.message_readers import compare
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import door
from tests.unit.serving.bundles import MODEL

V1 = Release(model=MODEL, version=1)
INFER = f"/v2/models/{MODEL}/infer"
TEXT_BYTES = 300
GOOD = {
    "inputs": [
        {"name": "temp", "datatype": "FP32", "shape": [2, 1], "data": [0.5, 1.5]},
        {"name": "carrier", "datatype": "BYTES", "shape": [2, 1], "data": ["AA", 'a "shape": [1] \\ ü']},
    ]
}
LENGTH = "inference-header-content-length"


class Echo(BaseHTTPRequestHandler):
    """Says which headers arrived, and how much of a body."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        seen = {name.lower() for name in self.headers}
        text = json.dumps([self.path, sorted(seen), self.headers.get("x-serin-model"), len(body)]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def doors() -> Iterator[tuple[int, int]]:
    """The ports of a door with the compiled filter and of one with the script, before the same server."""
    if find_request_filter() is None:
        pytest.skip("no filter was compiled here: there was no C++ compiler when Triton was installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = Endpoint(http=f"127.0.0.1:{server.server_port}", grpc="127.0.0.1:1")  # nobody takes calls there
    with ExitStack() as exits:
        ports = []
        for compiled in (True, False):
            gateway, port, host = exits.enter_context(door(compiled=compiled))
            limits = {MODEL: Timeouts(request_s=60.0, max_text_bytes=TEXT_BYTES)}
            gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=V1)], {V1.name: place}, limits)
            wait_for("the route", lambda port=port: _led(port), host, PROCESS_NAME)  # type: ignore[misc]
            ports.append(port)
        yield ports[0], ports[1]
    server.shutdown()
    server.server_close()


def _led(port: int) -> bool:
    with (
        closing(http.client.HTTPConnection("127.0.0.1", port)) as wire,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        calls = call(channel, "ModelInfer", good_frame()[5:])[0] == "UNAVAILABLE"
        return post(wire, INFER, b"{}", {})[0] == 200 and calls


def post(
    wire: http.client.HTTPConnection, path: str, body: Any, headers: dict[str, str]
) -> tuple[int, str, str | None]:
    wire.request("POST", path, body, headers, encode_chunked="transfer-encoding" in headers)
    answer = wire.getresponse()
    return answer.status, answer.read().decode(), answer.getheader("content-type")


def call(wire: grpc.Channel, method: str, message: bytes, **options: Any) -> tuple[str, str]:
    try:
        wire.unary_unary(f"{SERVICE}/{method}")(message, timeout=20, **options)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


PATHS = [
    INFER, f"{INFER}?a=1", f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}/ready", "/v2/infer",
]  # fmt: skip
LENGTHS = ["", "0", "7", "x", "-1", "+3", " 5", "1e1", "0x9", "9" * 30, "1, 2", "99999"]
HEADERS = [
    {"content-encoding": "gzip"},
    {"content-encoding": ""},
    {"authorization": "Bearer serin_abc"},
    {"authorization": "Basic abc"},
    {"x-serin-model": "other", "x-serin-may": ",x,"},
    {"expect": "100-continue"},
]
SHAPES = [
    "[]", "[1]", "[1,2]", "[ 1 , 2 ]", "[-1]", "[2.5, 2]", "[1e3]", "[1e300, 0]", "[0, 99999]", "[99999, 0]", "[99999",
    "[,,]", '["99999"]', "[null]", "[[99999]]", "[0x7fffffff]", "[inf]", "[ ]", "{}", "99999", "[1\n,\t99999]",
    "[999999999999999999999999]", "[1] [99999]", "[100000]]",
]  # fmt: skip
KEYS = [
    '"shape"', '"shape" ', '"shape"  ', "'shape'", '"sh\\u0061pe"', '"sh\\\\u0061pe"', '\\"shape"',
]  # fmt: skip
BODIES = [
    "", "[" * 5000, "[" * 30 + "]" * 5000, '{"a":' * 1000, " " * 5000, '"' + "[" * 4095 + '"', '"' + "\\" * 5000,
    "\\u0061", "\\", '"\\u00', '"shape":', '"shape"', '"shape":[', '"' + "x" * 5000,
    *(f'"{"x" * (6 * TEXT_BYTES + more)}"' + " " * 4000 for more in (-9, 0, 9)),
    *('"' + "\\u0020" * (TEXT_BYTES + more) + '"' + " " * 4000 for more in (-9, 0, 9)),
]  # fmt: skip


def web_cases() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    text = json.dumps(GOOD).encode()
    for path in PATHS:
        yield path, text, {}
        yield path, b'{"shape":[99999]}', {}
    for headers in (*HEADERS, *({LENGTH: length} for length in (*LENGTHS, str(len(text))))):
        yield INFER, text, headers
    for shape in SHAPES:
        for key in KEYS:
            yield INFER, f'{{"inputs": [{{{key}:{shape}}}]}}'.encode(), {}
    for body in BODIES:
        yield INFER, body.encode(), {}


def random_bodies(count: int) -> Iterator[bytes]:
    """The same ones each time: words that matter, in any order, in a text that may be long."""
    draw = random.Random(7)
    words = [
        '"shape"',
        ":",
        "[",
        "]",
        ",",
        "1",
        "99999",
        " ",
        "\n",
        "\\u00",
        "6",
        "\\",
        '"',
        "{",
        "}",
        "-",
        "1e9",
        "é",
        "x" * 400,
    ]
    for _ in range(count):
        text = "".join(draw.choice(words) for _ in range(draw.randrange(1, 60)))
        yield text.encode() + (b" " * 4096 if draw.random() < 0.3 else b"")


def messages(good: bytes) -> Iterator[bytes]:
    yield from (b"", good, b"\x0a", b"\x0a\x05ab", b"\x2a\x03\x1a\x01\x01", b"\x2a\x05\x1a\x03\xff\xff\x7f")
    for name in (b"", MODEL.encode(), b"A", b"a,b", b"x" * 64, b"\xff"):
        yield b"\x0a" + bytes([len(name)]) + name
    for version in (b"", b"1", b"01", b"x", b"9" * 20):
        yield good + b"\x12" + bytes([len(version)]) + version
    for tail in (
        b"\x08\x01",
        b"\x0b",
        b"\x28\x01",
        b"\x2a\x02\x18\x01",
        b"\x2a\x0b\x18" + b"\xff" * 9 + b"\x01",
    ):
        yield good + tail
    draw = random.Random(7)
    for _ in range(150):
        changed = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield bytes(changed)


def test_both_say_the_same_over_http(doors: tuple[int, int]) -> None:
    cases = [*web_cases(), *((INFER, body, {}) for body in random_bodies(300))]
    refused = 0
    with ExitStack() as exits:
        wires = [
            exits.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port))) for port in doors
        ]
        for path, body, headers in cases:
            compiled, script = (post(wire, path, body, headers) for wire in wires)
            assert compiled == script, (path, body[:200], headers)
            refused += compiled[0] == 400
        assert 100 < refused < len(cases) - 100
        text = json.dumps(GOOD).encode()
        for pieces in ([text[:9], text[9:99], text[99:]], [b'{"sha', b'pe":[99', b"999]}"]):
            compiled, script = (
                post(wire, INFER, iter(pieces), {"transfer-encoding": "chunked"}) for wire in wires
            )
            assert compiled == script


def test_both_say_the_same_over_grpc(doors: tuple[int, int]) -> None:
    good, seen = good_frame()[5:], set()
    with ExitStack() as exits:
        wires = [exits.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for port in doors]
        for message in messages(good):
            for method in ("ModelInfer", "ModelReady"):
                compiled, script = (call(wire, method, message) for wire in wires)
                assert compiled == script, (method, message)
                seen.add(compiled[0])
        assert {"INVALID_ARGUMENT", "UNAVAILABLE"} <= seen
        long, gzip = b"\x0a\xe8\x07" + b"a" * 1000, grpc.Compression.Gzip
        compiled, script = (call(wire, "ModelInfer", long, compression=gzip) for wire in wires)
        assert compiled == script
        assert compiled[0] == "UNIMPLEMENTED"


def test_the_script_reads_a_message_as_protobuf_does_or_refuses_it() -> None:
    """As the compiled one does (test_checker.py), in Envoy's own Lua."""
    with lua_reader() as reader:
        found = compare(reader.read, number=2, count=5000)
    print(found)
    assert found.wrong == []
    assert min(found.equal, found.refused) > 1000
