"""Servers of KServe v2 behind a real Envoy that records, and what is in its rings."""

import ctypes
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from serin.formats.serving.ring import FILLER, FIXED, SUFFIX, Ring
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, WebServer, in_a_thread
from tests.unit.serving.bundles import MODEL

V1, V2 = Release(model=MODEL, version=1), Release(model=MODEL, version=2)
INFER = f"/v2/models/{MODEL}/infer"
METHOD = f"{SERVICE}/ModelInfer"
MEMORY = Path("/dev/shm")


class Record(NamedTuple):
    """An entry of a ring."""

    kind: int
    protocol: int
    t: float
    us: float
    code: int
    grpc: int
    epoch: int
    share: float
    request_json: int
    answer_json: int
    encoding: int
    release: str
    arm: str
    id: str
    client_id: str
    model: str
    request: bytes
    answer: bytes


def read_ring(ring: Ring) -> list[Record]:
    """All entries that wait in a ring."""
    found, _ = ring.read(ring.tail)
    spans = sorted(
        span
        for each in found
        for span in zip(each.start.tolist(), each.end.tolist(), each.place.tolist(), strict=True)
    )
    return [_record(ctypes.string_at(ring.address + place, end - start)) for start, end, place in spans]


def _record(entry: bytes) -> Record:
    _, kind, *fixed = FIXED.unpack_from(entry)
    assert kind != FILLER
    fixed, lengths = fixed[:-7], fixed[-7:]
    texts, at = [], FIXED.size
    for length in lengths:
        texts.append(entry[at : at + length])
        at += length
    assert len(entry) - at < 8
    assert not any(entry[at:])
    names = (text.decode() for text in texts[:5])
    return Record(kind, *fixed, *names, *texts[5:])


@dataclass
class Server:
    """What a release answers, over HTTP and gRPC, after how long."""

    name: bytes
    status: int = 200
    grpc_status: grpc.StatusCode = grpc.StatusCode.OK
    delay_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes | None = None
    compression: grpc.Compression = grpc.Compression.NoCompression
    asked: int = 0
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(http="", grpc=""))

    def respond(self) -> bytes:
        self.asked += 1
        time.sleep(self.delay_s)
        return self.answer if self.answer is not None else b'{"outputs": [], "by": "' + self.name + b'"}'


class _Http(WebServer):
    def __init__(self, known: Server) -> None:
        super().__init__(_Handler)
        self.known = known


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Http

    def do_POST(self) -> None:
        self.read_body()
        known = self.server.known
        self.answer(known.respond(), known.status, **known.headers)


@contextmanager
def serving(name: str) -> Iterator[Server]:
    known = Server(name.encode())

    def infer(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_compression(known.compression)
        answer = known.respond()
        if known.grpc_status != grpc.StatusCode.OK:
            context.abort(known.grpc_status, "as the test wants it")
        return answer

    handler = grpc.unary_unary_rpc_method_handler(infer)
    calls = grpc.server(ThreadPoolExecutor(8))
    calls.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE.strip("/"), {"ModelInfer": handler})]
    )
    port = calls.add_insecure_port("127.0.0.1:0")
    calls.start()
    try:
        with in_a_thread(_Http(known)) as web:
            known.endpoint = Endpoint(http=f"127.0.0.1:{web.server_port}", grpc=f"127.0.0.1:{port}")
            yield known
    finally:
        calls.stop(None).wait()


@dataclass
class Scene:
    gateway: Gateway
    port: int
    host: ChildHost
    servers: dict[Release, Server]
    epoch: int = 0

    def route(self, percent: float = 0.0, request_s: float = 20.0, **shares: float) -> None:
        """`shares`: by `v1` and `v2`; the candidate is v2."""
        self.epoch += 1
        route = ModelRoute(
            model=MODEL,
            epoch=self.epoch,
            stable=V1,
            candidate=V2 if percent else None,
            candidate_percent=percent,
        )
        recorded = {f"{MODEL}-{version}": share for version, share in shares.items()}
        limits = Timeouts(request_s=request_s, promised_s=0.02, shares=recorded)
        self.gateway.apply([route], self.endpoints(), {MODEL: limits})
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as wire:
            wait_for("the route", lambda: self._answers(wire), self.host)

    def endpoints(self) -> dict[str, Endpoint]:
        return {release.name: server.endpoint for release, server in self.servers.items()}

    def _answers(self, wire: http.client.HTTPConnection) -> bool:
        wire.request("GET", f"/v2/models/{MODEL}/ready")
        answer = wire.getresponse()
        answer.read()
        return answer.status != 404

    def post(self, body: bytes, path: str = INFER, **headers: str) -> tuple[int, str, bytes]:
        """Status, id and body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as wire:
            wire.request("POST", path, body, named)
            answer = wire.getresponse()
            return answer.status, answer.getheader("x-request-id") or "", answer.read()

    def call(self, message: bytes | None = None, **options: Any) -> tuple[grpc.StatusCode, str]:
        """Status and id."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = channel.unary_unary(METHOD)
            try:
                _, known = call.with_call(message or MESSAGE, timeout=30, **options)
            except grpc.RpcError as error:
                return error.code(), dict(error.initial_metadata()).get("x-request-id", "")
            return known.code(), dict(known.initial_metadata())["x-request-id"]

    @contextmanager
    def rings(self) -> Iterator[list[Ring]]:
        found = [Ring(path) for path in sorted(self.gateway.rings.glob(f"*{SUFFIX}"))]
        try:
            yield found
        finally:
            for ring in found:
                ring.close()

    def take(self) -> list[Record]:
        """What the rings hold, oldest first; then they are empty."""
        found = []
        with self.rings() as rings:
            for ring in rings:
                head = ring.head
                found += read_ring(ring)
                ring.release(head)
        return sorted(found, key=lambda record: record.t)

    def counts(self) -> tuple[int, int]:
        """Drawn and dropped, since the gateway started."""
        with self.rings() as rings:
            return sum(ring.drawn for ring in rings), sum(ring.dropped for ring in rings)


MESSAGE = good_frame()[5:]


@contextmanager
def recording_gateway(**settings: Any) -> Iterator[Scene]:
    with ExitStack() as exits:
        servers = {release: exits.enter_context(serving(release.name)) for release in (V1, V2)}
        gateway, port, host = exits.enter_context(lone_gateway(place=MEMORY, **settings))
        yield Scene(gateway, port, host, servers)
