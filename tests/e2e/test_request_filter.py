"""The gateway's request filter in a real Envoy: what it refuses over HTTP and gRPC, and what it passes on."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from serin.machine.ports import free_ports
from serin.serving.children import Children
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.message_readers import TOO_LARGE, UNREADABLE
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, web_server
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
TEXT = json.dumps(GOOD).encode()
LENGTH = "inference-header-content-length"
NO_LENGTH = "inference-header-content-length is no length of a part of this request"
HIDDEN = "plain letters must not be written as \\u escapes"
TOO_DEEP = "the request's JSON is nested too deeply"
TOO_LONG = f"a text in the request is too long; at most {TEXT_BYTES} bytes are taken"
COMPRESSED = "compressed requests are not accepted; send the body as it is"
FOREIGN = "no such model or version is served here"


class Echo(Handler):
    """Says which headers and which body arrived."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_POST(self) -> None:
        body = self.read_body()
        seen = {name.lower() for name in self.headers}
        known = [
            self.path,
            sorted(seen),
            self.headers.get("x-serin-model"),
            len(body),
            body.decode("latin-1"),
        ]
        text = json.dumps([*known, self.headers.get(LENGTH)]).encode()
        self.answer(text)


@contextmanager
def echoing(library: Path | None = None, *, elsewhere: bool = False) -> Iterator[int]:
    """The port of a gateway before a server that echoes. Nobody takes gRPC calls behind it."""
    with echo() as place, lone_gateway(library=library) as (gateway, port, host):
        place = replace(place, elsewhere=elsewhere)
        limits = {MODEL: Timeouts(request_s=60.0, max_text_bytes=TEXT_BYTES)}
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=V1)], {V1.name: place}, limits)
        wait_for("the route", lambda: _led(port), host)
        yield port


@contextmanager
def echo() -> Iterator[Endpoint]:
    with web_server(Echo) as port:
        yield Endpoint(http=f"127.0.0.1:{port}", grpc="127.0.0.1:1")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with echoing() as opened:
        yield opened


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


# A shape as it is written, and whether the request can hold what it claims.
SHAPES = {
    "[]": True, "[1]": True, "[1,2]": True, "[ 1 , 2 ]": True, "[2.5, 2]": True, "[,,]": True, '["99999"]': True,
    "[null]": True, "[[99999]]": True, "[ ]": True, "{}": True, "99999": True, "[1] [99999]": True, "[99999": True,
    "[-1]": False, "[1e3]": False, "[1e300, 0]": False, "[0, 99999]": False, "[99999, 0]": False,
    "[0x7fffffff]": False, "[inf]": False, "[1\n,\t99999]": False, "[999999999999999999999999]": False,
    "[100000]]": False,
}  # fmt: skip
# Keys that are read as a shape, and those that are not.
READ_AS_SHAPE = {
    '"shape"': True,
    '"shape"  ': True,
    '\\"shape"': True,
    "'shape'": False,
    '"sh\\\\u0061pe"': False,
}


def refused(port: int, body: bytes, path: str = INFER, **headers: str) -> str:
    """What the gateway says against a request; empty when the server behind it was asked."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as wire:
        status, text, kind = post(
            wire, path, body, {key.replace("_", "-"): value for key, value in headers.items()}
        )
    if status == 200:
        return ""
    assert kind == "application/json"
    return str(json.loads(text)["error"])


def test_a_shape_that_claims_more_than_the_request_holds_is_refused_however_it_is_written(port: int) -> None:
    wrong = []
    for shape, fits in SHAPES.items():
        for key, is_read in READ_AS_SHAPE.items():
            body = f'{{"inputs": [{{{key}:{shape}}}]}}'
            if refused(port, body.encode()) != ("" if fits or not is_read else TOO_LARGE):
                wrong.append(body)
    assert wrong == []
    assert refused(port, b'{"sh\\u0061pe": [1]}') == HIDDEN


def test_only_inference_of_models_is_looked_into_and_a_length_bounds_its_json(port: int) -> None:
    large = b'{"shape":[99999]}'
    for path in (INFER, f"{INFER}?a=1", f"/v2/models/{MODEL}/versions/1/infer"):
        assert refused(port, TEXT, path) == ""
        assert refused(port, large, path) == TOO_LARGE
    assert refused(port, large, f"/v2/models/{MODEL}/ready") == FOREIGN, (
        "it is not read, and POST has no route"
    )
    for length in ("", "x", "-1", "+3", "1e1", "0x9", "9" * 30, "1, 2", "99999"):
        assert refused(port, TEXT, **{LENGTH: length}) == NO_LENGTH, length
    for length in ("0", "7", str(len(TEXT))):
        assert refused(port, TEXT, **{LENGTH: length}) == ""
    assert refused(port, large, **{LENGTH: "5"}) == "", "the rest is a tensor"


def test_deep_json_and_long_texts_are_refused(port: int) -> None:
    pad = " " * 4000  # below 4096 bytes nothing is long or deep
    cases = {
        "": "", "[" * 5000: TOO_DEEP, "[" * 30 + "]" * 5000: "", '{"a":' * 1000: TOO_DEEP, " " * 5000: "",
        '"' + "[" * 4095 + '"': TOO_LONG, "\\u0061": HIDDEN, '"shape":[': "", '"' + "x" * 5000: TOO_LONG,
        f'"{"x" * (6 * TEXT_BYTES - 9)}"{pad}': "", f'"{"x" * (6 * TEXT_BYTES + 9)}"{pad}': TOO_LONG,
        '"' + "\\u0020" * TEXT_BYTES + '"' + pad: "", '"' + "\\u0020" * (TEXT_BYTES + 9) + '"' + pad: TOO_LONG,
    }  # fmt: skip
    assert {body: refused(port, body.encode()) for body in cases} == cases


def test_a_body_in_pieces_is_read_as_a_whole(port: int) -> None:
    chunked = {"transfer-encoding": "chunked"}
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as wire:
        status, text, _ = post(wire, INFER, iter([TEXT[:9], TEXT[9:99], TEXT[99:]]), chunked)
        assert (status, json.loads(text)[3]) == (200, len(TEXT))
        status, text, _ = post(wire, INFER, iter([b'{"sha', b'pe":[99', b"999]}"]), chunked)
        assert (status, json.loads(text)["error"]) == (400, TOO_LARGE)


def tensors(**data: str) -> bytes:
    """A request whose inputs are named by their type, with `data` as it is written."""
    inputs = [
        f'{{"data" : {each}, "name": "{kind.lower()}", "shape": [2], "datatype":"{kind}"}}'
        for kind, each in data.items()
    ]
    return f'{{"id": "null", "inputs": [{", ".join(inputs)}]}}'.encode()


def arrived(port: int, body: Any, **headers: str) -> tuple[bytes, str | None]:
    """The body that reached the server, and the length of its JSON."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as wire:
        status, text, _ = post(wire, INFER, body, named)
    assert status == 200, text
    return json.loads(text)[4].encode("latin-1"), json.loads(text)[5]


def test_nulls_and_integral_floats_are_written_out_and_everything_else_stays(port: int) -> None:
    sent = {
        "FP32": "[null, 1.50]", "INT64": "[[2007.0], [null]]", "INT8": "[null,1e0]", "BYTES": '[ null,"ü null"]',
    }  # fmt: skip
    written = tensors(
        FP32="[NaN, 1.50]",
        INT64="[[2007], [-9223372036854775808]]",
        INT8="[-1,1]",
        BYTES='[ "","ü null"]',
    )
    body = tensors(**sent)
    assert arrived(port, body) == (written, None)
    assert arrived(port, iter([body[:50], body[50:90], body[90:]]), transfer_encoding="chunked")[0] == written
    binary = b"\x00null\xff" * 40
    assert arrived(port, body + binary, **{LENGTH: str(len(body))}) == (written + binary, str(len(written)))
    for same in (TEXT, b"{}", b'{"inputs": [null', tensors(BOOL="[null]", FP32="[NaN, 2007.0]"), written):
        assert arrived(port, same)[0] == same
    large = tensors(FP32="[" + ",".join(["null"] * 200_000) + "]")
    assert arrived(port, large)[0] == large.replace(b"null", b"NaN").replace(b'"NaN"', b'"null"')


def test_a_value_that_does_not_fit_is_refused_with_its_input_and_place(port: int) -> None:
    cases = {
        "FP32": ('[1, "x"]', "input 'fp32', data[1]: \"x\" is not a number"),
        "INT64": ("[[1], [2007.5]]", "input 'int64', data[1][0]: 2007.5 is not an integer"),
        "INT8": ("[128.0]", "input 'int8', data[0]: 128.0 does not fit into INT8"),
        "BYTES": ('["a", 7]', "input 'bytes', data[1]: 7 is not a string"),
        "INT32": ("[null]", "input 'int32', data[0]: null is not a value of type INT32"),
    }
    found = {kind: refused(port, tensors(**{kind: data})) for kind, (data, _) in cases.items()}
    assert found == {kind: text for kind, (_, text) in cases.items()}
    nulls = tensors(INT64="[" + ",".join(["null"] * 2_000_000) + "]")
    assert "too large with its nulls written out" in refused(port, nulls)


def test_a_server_of_somebody_else_gets_the_body_as_it_is() -> None:
    with echoing(elsewhere=True) as opened:
        body = tensors(FP32="[null]", INT64="[2007.0, 1.5]")
        assert arrived(opened, body)[0] == body


def test_headers_of_the_gateway_and_keys_do_not_pass_and_compressed_bodies_are_refused(port: int) -> None:
    for encoding in ("gzip", ""):
        assert refused(port, TEXT, content_encoding=encoding) == COMPRESSED
    given = {
        "authorization": "Bearer serin_abc",
        "x-serin-model": "other",
        "x-serin-may": ",x,",
        "accept": "x/y",
    }
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as wire:
        _, text, _ = post(wire, INFER, TEXT, given)
        assert not {"authorization", "x-serin-model", "x-serin-may"} & set(json.loads(text)[1])
        _, text, _ = post(wire, INFER, TEXT, {"traceparent": "00-1", "tracestate": "a=b"})
        assert {"traceparent", "tracestate", "x-request-id"} <= set(json.loads(text)[1])
        _, text, _ = post(wire, INFER, TEXT, {"authorization": "Basic abc"})
        assert "authorization" in json.loads(text)[1], "another server's business"


def test_a_message_is_led_by_the_model_in_it_or_refused(port: int) -> None:
    """test_smuggling.py and the unit tests draw thousands."""
    good = good_frame()[5:]
    asked = ("UNAVAILABLE", None)  # nobody is there
    cases = {
        good: asked,
        b"": ("NOT_FOUND", FOREIGN),
        b"\x0a": ("INVALID_ARGUMENT", UNREADABLE),
        b"\x2a\x05\x1a\x03\xff\xff\x7f": ("INVALID_ARGUMENT", TOO_LARGE),
        b"\x0a\x03a,b": ("NOT_FOUND", FOREIGN),
        b"\x0a\x01\xff": ("INVALID_ARGUMENT", UNREADABLE),
        good + b"\x12\x011": asked,
        good + b"\x12\x0201": ("NOT_FOUND", FOREIGN),
        good + b"\x0a\x01x": ("INVALID_ARGUMENT", UNREADABLE),
        good + b"\x0b": ("INVALID_ARGUMENT", UNREADABLE),
    }
    with grpc.insecure_channel(f"127.0.0.1:{port}") as wire:
        for message, (status, text) in cases.items():
            found = call(wire, "ModelInfer", message)
            assert found[0] == status, (message, found)
            assert text is None or found[1] == text, message
        gzip = grpc.Compression.Gzip
        assert call(wire, "ModelInfer", b"\x0a\xe8\x07" + b"a" * 1000, compression=gzip)[0] == "UNIMPLEMENTED"


def test_a_gateway_without_the_filter_is_open_to_this_machine_alone_and_leads_no_calls(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    gateway = Gateway(tmp_path, admin=tmp_path / "a", log=tmp_path / "log")
    gateway.write_bootstrap(port, "0.0.0.0", request_filter=None)
    with echo() as place, Children() as host:
        host.start(gateway.process())
        wait_for("Envoy", gateway.ready, host)
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=V1)], {V1.name: place})
        wait_for("the route", lambda: refused(port, TEXT) == "", host)
        (listening,) = {
            each.laddr.ip
            for each in psutil.Process(host.pid(PROCESS_NAME)).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port
        }
        assert listening == "127.0.0.1"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as wire:
            assert call(wire, "ModelInfer", good_frame()[5:]) == ("NOT_FOUND", FOREIGN)
