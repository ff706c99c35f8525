"""Sends drawn requests to a real gateway beside good clients, and reports what went wrong and what is left."""

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tritonclient.grpc import service_pb2

from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from tests.e2e.fuzz_requests import (
    GrpcCall,
    HttpRequest,
    good_body,
    good_frame,
    good_rows,
    grpc_calls,
    http_requests,
)
from tests.e2e.serving_stack import Stack
from tests.kit.threads import beside
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

_CLIENTS_FAULT = {"0", "3", "5", "7", "11", "12"}  # OK, and what gRPC says when the caller is wrong
_LEAKS = ("Traceback", "site-packages", ".py", "/dev/shm", "onnxruntime")


@dataclass
class Findings:
    """`wrong` counts what must not be; `examples` holds the first request of each kind."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    examples: dict[str, object] = field(default_factory=dict)

    def note(self, kind: str, status: str, text: str, example: object, *, good: bool) -> None:
        self.seen[f"{kind} {status}"] += 1
        if any(word in text for word in _LEAKS):
            good, text = False, f"leaks: {text}"
        if not good:
            name = f"{kind} {status}: {text[:120]}"
            self.wrong[name] += 1
            self.examples.setdefault(name, example)

    @property
    def requests(self) -> int:
        return sum(self.seen.values())


def fuzz(stack: Stack, count: int, *, number: int) -> Findings:
    """`count` requests, a quarter of them by gRPC; with the same `number` the same ones."""
    found = Findings()
    calls = Http2(stack.port)
    chosen = settings(
        max_examples=count - count // 4, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip

    def by_http(request: HttpRequest) -> None:
        status, text = send(stack.port, request)
        owed = request.framed and request.cut is None
        found.note("http", status, text, request, good=status < "500" if status.isdigit() else not owed)

    def by_grpc(call: GrpcCall) -> None:
        status, text = calls.call(call)
        late = status == "4" and "grpc-timeout" in call.headers
        long = status == "reset" and "x" in call.headers  # more headers than HTTP/2 allows here
        found.note("grpc", status, text, call, good=status in _CLIENTS_FAULT or late or long)

    try:
        chosen(seed(number)(given(http_requests())(by_http)))()
        settings(chosen, max_examples=count // 4)(seed(number)(given(grpc_calls())(by_grpc)))()
    finally:
        calls.close()
    return found


def send(port: int, request: HttpRequest) -> tuple[str, str]:
    """Status and text of the answer; ("no answer", why) without one."""
    data = (request.head + request.body)[: request.cut]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for number, start in enumerate(range(0, len(data), request.pieces)):
                wire.sendall(data[start : start + request.pieces])
                if request.pause_s and number < 5:
                    time.sleep(request.pause_s)
        except OSError:  # it has been answered and closed before all was sent
            pass
        if request.cut is not None:
            return "no answer", "cut"
        if not request.framed:
            wire.settimeout(0.05)
        return _answer(wire, silent=request.head.startswith(b"HEAD "))


def _answer(wire: socket.socket, *, silent: bool) -> tuple[str, str]:
    got = b""
    try:
        while b"\r\n\r\n" not in got or got.startswith(b"HTTP/1.1 100"):
            if got.startswith(b"HTTP/1.1 100") and b"\r\n\r\n" in got:
                got = got.partition(b"\r\n\r\n")[2]
                continue
            more = wire.recv(65536)
            if not more:
                return "no answer", "closed"
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        while not silent and len(body) < length and (more := wire.recv(65536)):
            body += more
        return lines[0].split()[1], body.decode(errors="replace")
    except TimeoutError:
        return "no answer", "late"
    except OSError as error:
        return "no answer", type(error).__name__


class Http2:
    """One connection, one call at a time, and the trailers too, which hold gRPC's status."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wire: socket.socket | None = None
        self.data = b""  # of the last answer

    def call(self, call: GrpcCall) -> tuple[str, str]:
        try:
            wire, state = self._connected()
            stream = state.get_next_available_stream_id()
            fixed = {":method": "POST", ":scheme": "http", ":path": call.method, ":authority": "x"}
            state.send_headers(stream, [*fixed.items(), *call.headers.items()])
            state.send_data(stream, call.frame, end_stream=True)
            wire.sendall(state.data_to_send())
            return self._read(wire, state, stream)
        except (OSError, h2.exceptions.ProtocolError) as error:
            self.close()
            return "no answer", repr(error)

    def close(self) -> None:
        if self._wire:
            self._wire.close()
        self._wire = None

    def _connected(self) -> tuple[socket.socket, h2.connection.H2Connection]:
        if self._wire is None:
            self._wire = socket.create_connection(("127.0.0.1", self._port), timeout=20)
            self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
            self._state.initiate_connection()
        return self._wire, self._state

    def _read(self, wire: socket.socket, state: h2.connection.H2Connection, stream: int) -> tuple[str, str]:
        headers: dict[str, str] = {}
        self.data = b""
        while True:
            data = wire.recv(65536)
            if not data:
                raise ConnectionResetError
            for event in state.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    headers.update(dict(event.headers))
                elif isinstance(event, h2.events.DataReceived):
                    self.data += event.data
                    state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamReset):
                    return "reset", str(event.error_code)
                elif isinstance(event, h2.events.ConnectionTerminated):
                    raise ConnectionResetError(str(event.error_code))
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    status = headers.get("grpc-status", f"http {headers.get(':status')}")
                    return status, headers.get("grpc-message", "")
            wire.sendall(state.data_to_send())


# what must stay as it is


@dataclass(frozen=True, slots=True)
class Footprint:
    pids: tuple[int, ...]
    rss_mb: float
    files: int
    shared_mb: float

    def __str__(self) -> str:
        return f"{self.rss_mb:.0f} MB resident, {self.files} descriptors, {self.shared_mb:.1f} MB shared"


def footprint(stack: Stack) -> Footprint:
    """Of Envoy, the Tritons and their Pythons."""
    releases = (stack.stable, stack.candidate)
    names = [PROCESS_NAME, *(release.name for release in releases)]
    processes = [psutil.Process(pid) for name in names if (pid := stack.host.pid(name))]
    processes += [child for process in processes for child in process.children(recursive=True)]
    records = [stack.folder / "releases" / release.name / "release.json" for release in releases]
    prefixes = tuple(json.loads(file.read_text())["place"]["shared_memory_prefix"] for file in records)
    regions = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes)]
    return Footprint(
        pids=tuple(sorted(process.pid for process in processes)),
        rss_mb=sum(process.memory_info().rss for process in processes) / 1e6,
        files=sum(process.num_fds() for process in processes),
        shared_mb=sum(path.stat().st_blocks * 512 for path in regions) / 1e6,
    )


@dataclass
class Healthy:
    """What good clients got while the others misbehaved."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_ms: float = 0.0


@contextmanager
def healthy_clients(stack: Stack, every_s: float = 0.05) -> Iterator[Healthy]:
    """By HTTP and gRPC, on connections of their own; the scores are looked at. (No library that draws random numbers:
    hypothesis would count them as its own.)"""
    seen, done = Healthy(), threading.Event()
    path = stack.store.bundle(MODEL, stack.stable.version).path
    wanted = float(bundles.score(path, good_rows())[0, 0])
    web, calls = http.client.HTTPConnection(stack.url, timeout=20), Http2(stack.port)
    call = GrpcCall(
        f"{SERVICE}/ModelInfer", good_frame(), {"content-type": "application/grpc", "te": "trailers"}
    )

    def by_http() -> float:
        web.request("POST", f"/v2/models/{MODEL}/infer", good_body())
        answer = json.loads(web.getresponse().read())
        return float(answer["outputs"][0]["data"][0])

    def by_grpc() -> float:
        status, _ = calls.call(call)
        assert status == "0"
        answer = service_pb2.ModelInferResponse.FromString(calls.data[5:])
        return float(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])

    def ask(name: str, score: Callable[[], float]) -> None:
        while not done.wait(every_s):
            began = time.perf_counter()
            try:
                found = score()
                if found != pytest.approx(wanted, abs=1e-6):
                    seen.failed.append(f"{name}: {found}")
            except (OSError, http.client.HTTPException, LookupError, AssertionError) as error:
                seen.failed.append(f"{name}: {error!r}")
                web.close()
            seen.answered += 1
            seen.slowest_ms = max(seen.slowest_ms, (time.perf_counter() - began) * 1000)

    clients = partial(ask, "http", by_http), partial(ask, "grpc", by_grpc)
    with closing(web), closing(calls), beside(*clients, stop=done):
        yield seen


@contextmanager
def stalled_clients(port: int, count: int) -> Iterator[None]:
    """Connections that begin a request and never end it, some in the head and some in the body."""
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode()
    with ExitStack() as held:
        for number in range(count):
            wire = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            wire.sendall(head[: 30 if number % 2 else None] + (b"" if number % 2 else b"{"))
        yield
