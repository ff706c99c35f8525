"""What the gateway refuses itself is answered in full over HTTP/1.1, HTTP/2 and gRPC, however long the body is."""

import http.client
import json
import shutil
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from serin.serving.envoy.access_logs import LINES_AT_ONCE, LINES_PER_S
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.tls import TlsFiles
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.h2_client import H2Client
from tests.e2e.reset_clients import padded_frame
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.unit.serving.bundles import MODEL

INFER = f"/v2/models/{MODEL}/infer"
LIMIT = 2_000_000
MISSING = (401, "a key is needed: send the header 'authorization: Bearer <key>'")
UNKNOWN = (401, "this key is not known here, or was revoked")
FOREIGN = (403, "this key may not ask for this model")
CALLS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}
# Bytes of a body, and how many requests with it: 60 where that is cheap.
BODIES = {None: 60, 20: 60, 1_000_000: 4, LIMIT: 2}


@dataclass
class Guarded:
    gateway: Gateway
    port: int
    host: ChildHost
    authority: Authority
    keys: dict[str, tuple[str | None, tuple[int, str]]]  # by what is wrong: the key, and the answer
    good: str

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority.certificate.decode())

    def http1(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.context(), timeout=30)

    def http2(self) -> H2Client:
        return H2Client(self.port, self.context())

    def channel(self) -> grpc.Channel:
        trusted = grpc.ssl_channel_credentials(root_certificates=self.authority.certificate)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.secure_channel(f"localhost:{self.port}", trusted, options=options)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    """A gateway with TLS and keys; nobody listens behind its one model."""
    folder, authority = Path(tempfile.mkdtemp(prefix="serin-tls-")), Authority()
    files = TlsFiles(certificate=folder / "cert.pem", key=folder / "key.pem")
    authority.pair().write(files.certificate, files.key)
    with lone_gateway(tls=files, max_request_bytes=LIMIT) as (gateway, port, host):
        release = Release(model=MODEL, version=1)
        nobody = Endpoint(http="127.0.0.1:1", grpc="127.0.0.1:1")
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=release)], {release.name: nobody})
        keys = KeyFile(path=gateway.folder.parent / "keys.json")
        good, other = keys.create("ours")[1], keys.create("others", models=["another"])[1]
        gateway.keys.follow()
        wrong = {
            "no key": (None, MISSING),
            "wrong key": (good[:-1] + "?", UNKNOWN),
            "other": (other, FOREIGN),
        }
        found = Guarded(gateway, port, host, authority, wrong, good)
        wait_for("both routes and keys", lambda: led(found), host)
        yield found
    shutil.rmtree(folder)


def led(guarded: Guarded) -> bool:
    """By every one of Envoy's threads, which take a change a moment later than it says."""
    for _ in range(8):
        with guarded.http2() as client:
            if client.ask(INFER, b"{}")[0] != 401 or client.ask(INFER, b"{}", bearer(guarded.good))[0] != 503:
                return False
    return True


def bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def over_http1(guarded: Guarded, ask: Callable[[Any], None]) -> None:
    with closing(guarded.http1()) as wire:
        ask(lambda body, key: ask_http1(wire, body, key))


def ask_http1(
    wire: http.client.HTTPConnection, body: bytes | None, key: str | None, path: str = INFER
) -> tuple[int, str]:
    wire.request("GET" if body is None else "POST", path, body, bearer(key))
    answer = wire.getresponse()
    text = answer.read()
    assert not answer.will_close, "an answer before the end of the body closes the connection"
    return answer.status, json.loads(text)["error"]


def over_http2(guarded: Guarded, ask: Callable[[Any], None]) -> None:
    def once(body: bytes | None, key: str | None) -> tuple[int, str]:
        status, said = client.ask(INFER, body, bearer(key))
        return status, said["error"]

    with guarded.http2() as client:
        ask(once)


def over_grpc(guarded: Guarded, ask: Callable[[Any], None]) -> None:
    with guarded.channel() as channel:
        infer, around = channel.unary_unary(f"{SERVICE}/ModelInfer"), len(padded_frame(0)) + 3

        def once(body: bytes | None, key: str | None) -> tuple[int, str]:
            message = padded_frame(max(len(body or b"") - around, 0))[5:]
            try:
                infer(message, timeout=30, metadata=[("authorization", f"Bearer {key}")] if key else [])
            except grpc.RpcError as error:
                return next(
                    code for code, name in CALLS.items() if name == error.code().name
                ), error.details()
            raise AssertionError("it was answered")

        ask(once)


@pytest.mark.parametrize("protocol", [over_http1, over_http2, over_grpc])
def test_a_request_without_the_right_key_gets_its_answer_whatever_its_body(
    guarded: Guarded, protocol: Callable[..., None]
) -> None:
    said: Counter[tuple[str, str]] = Counter()

    def ask(once: Callable[[bytes | None, str | None], tuple[int, str]]) -> None:
        for size, times in BODIES.items():
            body = None if size is None else b"0" * size
            for name, (key, answer) in guarded.keys.items():
                for _ in range(times):
                    assert once(body, key) == answer, (name, size)
                said[name, str(size)] += times

    protocol(guarded, ask)
    print(f"{protocol.__name__}: {sum(said.values())} refused, each with its answer")


def test_every_other_refusal_waits_for_the_body_too(guarded: Guarded) -> None:
    """Over HTTP/2, where an answer before the end of the body resets the stream."""
    large = b" " * 1_000_000
    unknown, path = "/v2/models/none/infer", "/elsewhere"
    words = {
        "no such model": (unknown, large, {}, 404),
        "no such version": (f"/v2/models/{MODEL}/versions/9/infer", large, {}, 404),
        "no such path": (path, large, {}, 404),
        "nobody listens": (INFER, b"{}" + large, {}, 503),
        "compressed": (INFER, large, {"content-encoding": "gzip"}, 415),
        "malformed": (INFER, b'{"shape":[99999999999]}' + large, {}, 400),
        "too large": (INFER, b" " * (LIMIT + 1), {}, 413),
        "too large, for no model": (unknown, b" " * (2 * LIMIT), {}, 413),
    }
    with guarded.http2() as client:
        for name, (where, body, headers, status) in words.items():
            for _ in range(3):
                found, said = client.ask(where, body, {**bearer(guarded.good), **headers})
                assert (found, list(said)) == (status, ["error"]), name
        assert client.ask(INFER, b" " * (LIMIT + 1))[0] == 413, "without a key"
        undeclared = client.ask(INFER, b" " * (LIMIT + 1), declared=False)
        assert undeclared == (401, {"error": MISSING[1]}), "without a key and without a length"
        assert client.ask("/v2/health/live", None)[0] == 200, "on the same connection"


def test_a_stream_that_is_refused_is_answered_while_its_client_waits(guarded: Guarded) -> None:
    over = threading.Event()

    def never() -> Iterator[bytes]:
        assert over.wait(30)
        yield from ()

    with guarded.channel() as channel:
        for metadata, code in (((), "UNAUTHENTICATED"), (bearer(guarded.good).items(), "UNIMPLEMENTED")):
            for method in ("ModelStreamInfer", "RepositoryIndex"):
                call = channel.stream_stream(f"{SERVICE}/{method}")(
                    never(), metadata=list(metadata), timeout=20
                )
                with pytest.raises(grpc.RpcError) as refused:
                    next(call)
                assert refused.value.code().name == code
        over.set()


def test_the_body_of_a_refused_request_takes_no_memory(guarded: Guarded) -> None:
    envoy = psutil.Process(guarded.host.pid(PROCESS_NAME))
    body = b"0" * 40_000_000
    with guarded.http2() as client:
        before = envoy.memory_info().rss
        for path, key, status in ((INFER, None, 401), ("/v2/models/none/infer", guarded.good, 404)):
            assert client.ask(path, body, bearer(key), declared=False)[0] == status
        grown = envoy.memory_info().rss - before
    print(f"80 MB refused: the gateway grew by {grown >> 20} MB")
    assert grown < 15 << 20


def test_refusals_are_counted_and_logged_apart_from_what_releases_answered(guarded: Guarded) -> None:
    gateway = guarded.gateway
    before, began = gateway.refused(), time.monotonic()
    evidence = gateway.log.read_text()
    many = 4 * LINES_AT_ONCE
    with guarded.http2() as client:
        for _ in range(many):
            assert client.ask(f"{INFER}?secret=1", b"{}")[0] == 401
    with guarded.channel() as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(f"{SERVICE}/ModelInfer")(b"", timeout=20)

    def counted() -> bool:
        more = Counter(gateway.refused()) - Counter(before)
        return more == {"401": many, "gRPC 16": 1}

    wait_for("the counters", counted, guarded.host)
    wait_for("the log", lambda: gateway.refusals.stat().st_size > 0, guarded.host)
    lines = [json.loads(line) for line in gateway.refusals.read_text().splitlines()]
    recent = [line for line in lines if line["code"] == 401 and line["path"] == INFER]
    print(f"{len(lines)} lines; counted: {gateway.refused()}")
    assert 0 < len(lines) <= LINES_AT_ONCE + (time.monotonic() - began + 120) * LINES_PER_S
    assert recent
    assert recent[-1]["from"] == "127.0.0.1"
    assert gateway.log.read_text() == evidence, "no refusal is evidence"
    assert "secret" not in gateway.refusals.read_text()
