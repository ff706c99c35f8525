"""Gateways that reach each other's releases with certificates, on real Envoys."""

import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_requests
from serin.formats.serving.ring import Ring
from serin.machine.ports import free_ports
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway, PeerPort
from serin.serving.envoy.routes import Timeouts
from serin.serving.envoy.tls import TlsFiles
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.ring_scene import Record, read_ring
from tests.e2e.serving_certificates import Authority, Pair
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.threads import beside
from tests.kit.waiting import until
from tests.kit.web import Handler, WebServer, ask, in_a_thread
from tests.signals import hit

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
LIMITS = {"m": Timeouts(request_s=8.0, promised_s=0.02, shares={V1.name: 1.0, V2.name: 1.0})}


class Server(WebServer):
    """A release that keeps the headers of its requests."""

    def __init__(self) -> None:
        super().__init__(Peer)
        self.status = 200
        self.seen: list[dict[str, str]] = []

    @property
    def endpoint(self) -> Endpoint:
        place = f"127.0.0.1:{self.server_port}"
        return Endpoint(http=place, grpc=place)


class Peer(Handler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.read_body()
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})
        self.answer(b"", self.server.status)


@dataclass
class Host:
    """A gateway with its certificate files and two releases."""

    gateway: Gateway
    port: int
    peer: str
    processes: ChildHost
    files: TlsFiles
    servers: dict[str, Server]

    def ask(self, **headers: str) -> tuple[int, str]:
        """Status and request id of an inference."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = ask(self.port, "/v2/models/m/infer", b"{}", named)
        return answer.status, answer.headers["x-request-id"]

    def logged(self, at_least: int) -> list[Request]:
        wait_for("the log", lambda: len(read_requests(self.gateway.log).requests) >= at_least, self.processes)
        return read_requests(self.gateway.log).requests


def write(files: TlsFiles, pair: Pair, authority: bytes) -> None:
    files.ca.write_bytes(authority)
    pair.write(files.certificate, files.key)


@contextmanager
def host(folder: Path, authority: Authority) -> Iterator[Host]:
    folder.mkdir()
    files = TlsFiles(certificate=folder / "peer.pem", key=folder / "peer.key", ca=folder / "ca.pem")
    write(files, authority.pair(), authority.certificate)
    (port,) = free_ports(1)
    place = PeerPort(address="127.0.0.1", port=port, files=files)
    servers = {release.name: Server() for release in (V1, V2)}
    with (
        ExitStack() as exits,
        lone_gateway(peers=place, place=Path("/dev/shm")) as (gateway, public, processes),
    ):
        for server in servers.values():
            exits.enter_context(in_a_thread(server))
        yield Host(gateway, public, f"127.0.0.1:{port}", processes, files, servers)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host, Host]]:
    """`a` has no release; `b` and `c` have both."""
    authority, folder = Authority(), tmp_path_factory.mktemp("peers")
    with ExitStack() as exits:
        a, b, c = (exits.enter_context(host(folder / name, authority)) for name in "abc")
        for other in (b, c):
            endpoints = {name: server.endpoint for name, server in other.servers.items()}
            other.gateway.apply([], endpoints, LIMITS)
        yield a, b, c


@pytest.fixture
def hosts(running: tuple[Host, Host, Host]) -> tuple[Host, Host, Host]:
    for each in running:
        for server in each.servers.values():
            server.status, server.seen = 200, []
    return running


def route(here: Host, *peers: Host, percent: float = 0.0, local: bool = False) -> None:
    wanted = ModelRoute(model="m", epoch=1, stable=V1, candidate=V2, candidate_percent=percent)
    names = [peer.peer for peer in peers]
    endpoints = {name: server.endpoint for name, server in here.servers.items()} if local else {}
    here.gateway.apply([wanted], endpoints, LIMITS, peers={V1.name: names, V2.name: names})


@contextmanager
def load(here: Host, threads: int = 4) -> Iterator[list[tuple[int, float]]]:
    """Statuses and seconds of requests that are sent all the time."""
    stop, done = threading.Event(), []

    def client() -> None:
        while not stop.is_set():
            began = time.monotonic()
            status, _ = here.ask()
            done.append((status, time.monotonic() - began))

    with beside(*[client] * threads, stop=stop):
        yield done


def test_a_peer_answers_and_only_the_first_gateway_logs_the_request(hosts: tuple[Host, Host, Host]) -> None:
    a, b, _ = hosts
    route(a, b)
    status, id_ = a.ask(x_request_id="mine", x_serin_release="m-v2", x_serin_arm="candidate")
    assert status == 200
    line = a.logged(1)[-1]
    assert (line.release, line.arm, line.attempts, line.id) == ("m-v1", "stable", 1, id_)
    (seen,) = b.servers["m-v1"].seen
    assert (seen["x-request-id"], seen["x-serin-client-id"]) == (id_, "mine")
    assert not b.gateway.log.exists() or b.gateway.log.read_bytes() == b""
    assert b.servers["m-v2"].seen == []


def test_the_first_gateway_records_a_request_under_the_release_that_answered_on_a_peer(
    hosts: tuple[Host, Host, Host],
) -> None:
    a, b, _ = hosts
    b.servers["m-v2"].status = 500
    route(a, b, percent=100.0)
    before = recorded(a)
    status, id_ = a.ask()
    assert status == 200
    wait_for("the record", lambda: recorded(a) != before, a.processes)
    (record,) = recorded(a)[len(before) :]
    assert (record.id, record.release, record.arm) == (id_, "m-v1", "candidate")
    assert recorded(b) == []


def recorded(host: Host) -> list[Record]:
    rings = [Ring(path) for path in sorted(host.gateway.rings.glob("*.ring"))]
    found = [record for ring in rings for record in read_ring(ring)]
    for ring in rings:
        ring.close()
    return sorted(found, key=lambda record: record.t)


def test_the_peer_port_answers_nobody_without_a_certificate_of_the_authority(
    hosts: tuple[Host, Host, Host],
) -> None:
    _, b, _ = hosts
    address, port = b.peer.split(":")
    stranger = Authority().pair()
    folder = b.files.ca.parent
    stranger.write(folder / "other.pem", folder / "other.key")
    for certificate in (None, (folder / "other.pem", folder / "other.key")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(*certificate)
        with (
            pytest.raises((ssl.SSLError, ConnectionError)),
            socket.create_connection((address, int(port)), timeout=5) as wire,
            context.wrap_socket(wire) as tls,
        ):
            tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert tls.recv(1) == b"", "it answers"
            raise ConnectionError("closed")


def test_a_candidate_that_fails_everywhere_costs_no_client_an_error(hosts: tuple[Host, Host, Host]) -> None:
    a, b, c = hosts
    for each in hosts:
        each.servers["m-v2"].status = 500
    before = len(read_requests(a.gateway.log).requests)
    route(a, b, c, percent=50.0, local=True)
    statuses = {a.ask()[0] for _ in range(60)}
    assert statuses == {200}
    lines = a.logged(before + 60)[before:]
    tried = {line.attempts for line in lines if line.arm == "candidate"}
    assert tried == {2}, "the stable release of this host answers at once"
    assert {line.attempts for line in lines if line.arm == "stable"} == {1}
    assert not b.servers["m-v1"].seen, "what this host answers goes to no other"


def test_certificates_are_replaced_without_an_error(hosts: tuple[Host, Host, Host]) -> None:
    a, b, c = hosts
    route(a, b, c)
    new = Authority()
    old = a.files.ca.read_bytes()
    with load(a) as done:
        for stage in ("trust both", "new pairs", "trust the new one"):
            for each in hosts:
                if stage == "trust both":
                    each.files.ca.write_bytes(old + new.certificate)
                elif stage == "new pairs":
                    new.pair().write(each.files.certificate, each.files.key)
                else:
                    each.files.ca.write_bytes(new.certificate)
                each.gateway.peer_tls.follow()
            so_far = len(done)
            until(lambda so_far=so_far: len(done) > so_far + 100)  # type: ignore[misc]
    assert {status for status, _ in done} == {200}


def test_a_lost_peer_costs_no_client_an_error(hosts: tuple[Host, Host, Host]) -> None:
    a, b, c = hosts
    route(a, b, c, percent=50.0)
    with load(a) as done:
        until(lambda: len(done) > 100)
        pid = b.processes.pid(PROCESS_NAME)
        assert pid is not None
        for strike in (signal.SIGSTOP, signal.SIGKILL):  # a stopped one is like a host that was cut off
            hit(pid, strike)
            so_far = len(c.servers["m-v1"].seen)
            until(lambda so_far=so_far: len(c.servers["m-v1"].seen) > so_far + 300)  # type: ignore[misc]
    print(f"{len(done)} requests, the slowest {max(seconds for _, seconds in done):.2f} s")
    assert {status for status, _ in done} == {200}
