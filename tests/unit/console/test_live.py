"""Live views from a real server: what changes is sent, what does not is not, and an ended session ends the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from serin.console import app
from serin.console.app import build_app
from serin.machine.ports import free_ports
from serin.stack.console.secrets import role_secret, rotate_secret
from serin.stack.console.settings import ConsoleSettings
from tests.unit.console.conftest import visitor
from tests.unit.console.scenes import fire
from tests.unit.serving.bundles import MODEL


@contextmanager
def served(home: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    config = uvicorn.Config(
        build_app(home, ConsoleSettings(), port), port=port, log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    name, data = "", list[str]()
    for line in lines:
        if line.startswith("event: "):
            name, data = line.removeprefix("event: "), []
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and name:
            yield name, "\n".join(data)
            name = ""


def test_a_stream_sends_a_view_when_it_changes_and_ends_with_the_session(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "VIEWS", [replace(view, every_s=0.05) for view in app.VIEWS])
    with served(home) as url, httpx.Client(base_url=url, timeout=30) as browser:
        fields = {"secret": role_secret(home, "viewer")}
        browser.post("/login", data=fields, headers={"origin": url})
        page = browser.get("/alerts").text
        place = page.partition('sse-connect="')[2].partition('"')[0].replace("&amp;", "&")
        with browser.stream("GET", place) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            found = events(stream.iter_lines())
            fire(home)
            name, html = next(found)  # the page that was loaded is not sent again
            assert name == "view"
            assert "the disk is nearly full" in html
            rotate_secret(home, "viewer")
            assert next(found) == ("ended", "")
            assert next(found, None) is None


@pytest.mark.parametrize("content", ["not JSON", None])
def test_a_view_that_cannot_be_read_is_reported_and_the_others_are_shown(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    inventory = tmp_path / "inventory.json"
    if content is not None:
        inventory.write_text(content)
    monkeypatch.setenv("SERIN_INVENTORY", str(inventory))
    somebody = visitor(full).login("viewer")
    answer = somebody.get("/gpus")
    assert answer.status_code in (500, 503)
    assert "<h1>Not shown</h1>" in answer.text
    assert somebody.get("/alerts").status_code == 200


def test_the_charts_data_has_a_column_for_each_line_and_gaps_where_nothing_was_asked(full: Path) -> None:
    somebody = visitor(full).login("viewer")
    for what, lines in (("latency", 4), ("failures", 2), ("requests", 2)):
        data = somebody.get(f"/models/{MODEL}/history.json?what={what}&span=1h").json()
        times, *columns = data["columns"]
        assert len(data["series"]) == len(columns) == lines
        assert times == sorted(set(times))
        assert all(len(column) == len(times) for column in columns)
        assert all(any(value is None for value in column) for column in columns)
        assert all(any(value is not None for value in column) for column in columns)
    assert somebody.get(f"/models/{MODEL}/history.json?what=else").status_code == 404
    assert visitor(full).get(f"/models/{MODEL}/history.json?what=latency").status_code == 401
