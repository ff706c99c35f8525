"""What other machines reach beside the models: the console and Prefect's API, with TLS and their logins."""

import base64
import http.client
import ssl
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from serin.console.app import build_app
from serin.host.console import ConsoleSettings, account_secret
from serin.machine.ports import free_ports, private_socket
from serin.serving.envoy.pages import Pages
from serin.serving.envoy.tls import TlsFiles
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, web_server
from tests.logs import heard

LOGIN = "Basic " + base64.b64encode(b"serin:right").decode()


class Prefect(Handler):
    """Requires a login, as the stack's Prefect server does, and answers with the path that arrived."""

    def do_GET(self) -> None:
        self.answer(self.path.encode(), 200 if self.headers["authorization"] == LOGIN else 401)


@dataclass
class Outside:
    """A client on another machine, which knows the authority of the gateway's certificate."""

    port: int
    trusted: ssl.SSLContext

    def ask(
        self, method: str, path: str, fields: dict[str, str] | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        body = urllib.parse.urlencode(fields) if fields else None
        form = {"content-type": "application/x-www-form-urlencoded"} if fields else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(
            http.client.HTTPSConnection("localhost", self.port, timeout=30, context=self.trusted)
        ) as wire:
            wire.request(method, path, body, {**form, **named})
            answer = wire.getresponse()
            answer.read()
            return answer


@contextmanager
def console(home: Path) -> Iterator[Path]:
    """The console's application at the socket that the gateway asks."""
    path = home / "console.sock"
    server = uvicorn.Server(
        uvicorn.Config(build_app(home, ConsoleSettings(), 8090), log_config=None, lifespan="off")
    )
    thread = threading.Thread(target=server.run, args=([private_socket(path)],), daemon=True)
    thread.start()
    try:
        yield path
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="serin-e2e-") as folder:  # short: it holds a unix socket
        yield Path(folder)


@pytest.fixture(scope="module")
def outside(home: Path) -> Iterator[Outside]:
    authority, (port,) = Authority(), free_ports(1)
    files = TlsFiles(certificate=home / "cert.pem", key=home / "key.pem")
    authority.pair().write(files.certificate, files.key)
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    with console(home) as socket, web_server(Prefect) as prefect_port:
        pages = Pages(address="127.0.0.1", port=port, console=socket, prefect_port=prefect_port)
        with lone_gateway(tls=files, pages=pages) as (_, _, host):
            found = Outside(port, trusted)
            wait_for("the console", lambda: found.ask("GET", "/health").status == 200, host, "gateway")
            yield found


def test_the_console_answers_with_tls_and_its_login_only(outside: Outside, home: Path) -> None:
    assert outside.ask("GET", "/models/churn").getheader("location") == "/login?next=/models/churn"
    answer = outside.ask("POST", "/login", {"secret": account_secret(home, "viewer")})
    cookie = answer.getheader("set-cookie") or ""
    assert answer.status == 303
    assert cookie.startswith("__Host-serin=")
    assert "Secure" in cookie
    assert "max-age" in (answer.getheader("strict-transport-security") or "")
    assert outside.ask("GET", "/alerts", cookie=cookie.partition(";")[0]).status == 200
    with closing(http.client.HTTPConnection("127.0.0.1", outside.port, timeout=30)) as wire:
        wire.request("GET", "/login")
        with pytest.raises((http.client.HTTPException, OSError)):
            wire.getresponse()


def test_a_page_elsewhere_sends_no_form_and_a_client_cannot_say_where_it_is(
    outside: Outside, home: Path
) -> None:
    fields = {"secret": account_secret(home, "viewer")}
    assert outside.ask("POST", "/login", fields, origin="https://evil.example").status == 403
    said: list[str] = []
    with heard(said.append):
        outside.ask("POST", "/login", {"secret": "wrong"}, x_forwarded_for="203.0.113.9")
    assert said == ["a login from 127.0.0.1 failed"]


@pytest.mark.parametrize(
    ("path", "login", "status"),
    [
        ("/api/flow_runs/count", LOGIN, 200),
        ("/api/flow_runs/count", "", 401),
        ("/api", LOGIN, 200),
        ("/x/../api/ready", LOGIN, 200),
        ("/apiary", LOGIN, 404),  # the console has no such page
        ("/v2/health/ready", LOGIN, 404),
        ("/api%2f..%2flogin", LOGIN, 400),
    ],
)
def test_what_is_below_api_goes_to_prefect_with_its_login(
    outside: Outside, path: str, login: str, status: int
) -> None:
    assert outside.ask("GET", path, authorization=login).status == status
