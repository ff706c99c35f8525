from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn

from serin.console.app import build_app
from serin.host.console import Account, ConsoleSettings, account_secret
from serin.machine.ports import free_ports
from tests.fakes.gpus import write_inventory
from tests.kit.waiting import until
from tests.unit.console.scenes import furnish

with warnings.catch_warnings():  # it prefers a successor of httpx, which nothing else here needs
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

BASE = "http://127.0.0.1:8090"


@dataclass
class Visitor:
    """A browser of somebody."""

    client: TestClient
    home: Path

    def login(self, account: Account, name: str = "") -> Visitor:
        fields = {"secret": account_secret(self.home, account), "name": name}
        assert self.post("/login", fields).status_code == 303
        return self

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path, follow_redirects=False)

    def post(self, path: str, fields: dict[str, str], origin: str | None = BASE) -> httpx.Response:
        headers = {"origin": origin} if origin else {}
        return self.client.post(path, data=fields, headers=headers, follow_redirects=False)

    def form(self, path: str) -> dict[str, str]:
        """The hidden fields of the page's last form."""
        page = self.get(path)
        assert page.status_code == 200, page.text
        form = page.text.rpartition("<form")[2]
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form))


def visitor(home: Path, settings: ConsoleSettings | None = None, base: str = BASE) -> Visitor:
    app = build_app(home, settings or ConsoleSettings(), 8090)
    return Visitor(TestClient(app, base_url=base, raise_server_exceptions=False), home)


@pytest.fixture(scope="package")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a bit of everything, which no test changes."""
    home = tmp_path_factory.mktemp("console") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(home))
        furnish(home).kill()
    write_inventory(home, ("GPU-0",))
    return home


@pytest.fixture
def full(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERIN_HOME", str(furnished))
    monkeypatch.setenv("SERIN_INVENTORY", str(furnished / "inventory.json"))
    return furnished


@contextmanager
def served(home: Path, follow: Callable[[], ConsoleSettings] = ConsoleSettings) -> Iterator[str]:
    """A console on a port; `follow`: see build_app."""
    (port,) = free_ports(1)
    app = build_app(home, follow(), port, follow)
    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the start of the server", alive=thread.is_alive)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
