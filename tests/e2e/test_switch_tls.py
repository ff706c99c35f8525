"""TLS is switched on while a gateway answers: nothing under way fails, and nothing new is answered without it."""

import http.client
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from serin.errors import GatewayRejected, TlsUnfit
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.tls import TlsFiles
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.h2_client import H2Client
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, web_server
from tests.unit.serving.bundles import MODEL

INFER = f"/v2/models/{MODEL}/infer"


class Server(Handler):
    """Answers at once, except for a body that asks to wait."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    asked, let_go = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        body = self.read_body()
        if b"wait" in body:
            self.asked.set()
            assert self.let_go.wait(60)
        self.answer()


@contextmanager
def server() -> Iterator[Endpoint]:
    with web_server(Server) as port:
        yield Endpoint(http=f"127.0.0.1:{port}", grpc="127.0.0.1:1")


def post(wire: http.client.HTTPConnection, body: bytes = b"{}") -> http.client.HTTPResponse:
    wire.request("POST", INFER, body)
    answer = wire.getresponse()
    answer.read()
    return answer


class Plain:
    """Asks all the time on one connection, until an answer says that it closes."""

    def __init__(self, port: int) -> None:
        self.answers: Counter[int] = Counter()
        self.last = ""
        self._port = port
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as wire:
            while not self.last:
                answer = post(wire)
                self.answers[answer.status] += 1
                self.last = answer.getheader("connection", "")


def test_tls_is_switched_on_under_load_and_nothing_under_way_fails(tmp_path: Path) -> None:
    authority, files = Authority(), TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with server() as place, lone_gateway() as (gateway, port, host):
        release = Release(model=MODEL, version=1)
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=release)], {release.name: place})
        pid = host.pid(PROCESS_NAME)
        plain = [Plain(port) for _ in range(3)]
        wait_for("load", lambda: all(client.answers[200] > 20 for client in plain), host)
        with pytest.raises(TlsUnfit):
            gateway.tls.switch_on(files)  # there are none yet
        assert not gateway.tls.is_on

        slow: list[int] = []
        waiting = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        asking = threading.Thread(target=lambda: slow.append(post(waiting, b"wait").status))
        asking.start()
        assert Server.asked.wait(30)
        authority.pair().write(files.certificate, files.key)
        gateway.tls.switch_on(files)
        for client in plain:
            client.thread.join(30)
        assert {(tuple(client.answers), client.last) for client in plain} == {((200,), "close")}
        with pytest.raises((http.client.HTTPException, OSError)):
            post(http.client.HTTPConnection("127.0.0.1", port, timeout=10))
        context = ssl.create_default_context(cadata=authority.certificate.decode())
        with closing(http.client.HTTPSConnection("localhost", port, context=context, timeout=30)) as wire:
            assert post(wire).status == 200
        with H2Client(port, context) as client:
            assert client.ask(INFER, b"{}")[0] == 200
        Server.let_go.set()
        asking.join(30)
        assert slow == [200], "asked before, answered after"
        assert (gateway.tls.is_on, gateway.admin.certificate_days() is not None) == (True, True)

        renewed = TlsFiles(certificate=tmp_path / "new.pem", key=tmp_path / "new.key")
        (pair := authority.pair()).write(renewed.certificate, renewed.key)
        gateway.tls.switch_on(renewed)
        wait_for("the other files", lambda: serial(port) == pair.serial, host)
        assert host.pid(PROCESS_NAME) == pid

        host.kill(PROCESS_NAME)
        host.start(gateway.process())
        wait_for("Envoy", gateway.ready, host)
        assert serial(port) == pair.serial, "also after a crash"


def test_a_port_that_was_taken_is_opened_when_it_is_free() -> None:
    """A supervisor may start Envoy again while something else has its port."""
    with lone_gateway() as (gateway, port, host):
        host.kill(PROCESS_NAME)
        with socket.create_server(("127.0.0.1", port)):
            host.start(gateway.process())
            wait_for("Envoy", lambda: answers(gateway), host)
            assert not gateway.ready()
            with pytest.raises(GatewayRejected, match="listener"):
                gateway.follow_listener()  # as the controller does every half second
        gateway.follow_listener()
        assert gateway.ready()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as wire:
            assert post(wire).status == 503, "no model has answered yet"


def answers(gateway: Gateway) -> bool:
    with suppress(GatewayRejected):
        return gateway.admin._ask("GET", "/ready")[0] == 200
    return False


def serial(port: int) -> int:
    from cryptography import x509

    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=10)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number
