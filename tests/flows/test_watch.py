"""What the scheduled watch says about a live model."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from prefect import get_client
from prefect.artifacts import Artifact
from prefect.events.filters import EventFilter, EventNameFilter

from flows.watch import watch
from serin.stack.wiring import request_log
from serin.store.store import Store
from tasks import watch as task_module
from tasks.watch import BROKEN_PROMISE
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def live_model(home: Path, tmp_path: Path) -> None:
    """A published version that promises a p99 of 20 ms and is live."""
    store = Store.open()
    with store.workspace() as folder:
        write_spec(folder, small_spec(tmp_path / "data", rows=10, serving={"p99_ms": 20}))
        (folder / "manifest.json").write_text("{}")
        version = store.reserve_version(NAME)
        store.publish_bundle(NAME, version, folder)
    store.set_alias(NAME, "live", version)


def log_requests(home: Path, count: int, *, ms: float, age_s: float = 10.0, model: str = NAME) -> None:
    path = request_log(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    now = time.time() - age_s
    line = {
        "model": model, "epoch": 1, "arm": "stable", "release": f"{model}-v1", "code": 200, "grpc": None,
        "us": ms * 1000, "up_us": ms * 900, "attempts": 1, "flags": "-", "proto": "HTTP/1.1",
    }  # fmt: skip
    with path.open("a") as file:
        for index in range(count):
            file.write(json.dumps({"t": now + index / 1000, **line, "id": f"r{index}"}) + "\n")


def test_a_model_that_keeps_its_promise_gets_a_page_with_a_picture(home: Path) -> None:
    log_requests(home, 50, ms=4)
    assert asyncio.run(watch()) == []
    page = Artifact.get(f"{NAME}-latency")
    assert page is not None
    assert "![late-parcels: the last 5 minutes](data:image/svg+xml;base64," in page.data
    assert "Every promise is kept." in page.data
    assert f"| {NAME}-v1 | stable | 50 |" in page.data


def test_a_broken_promise_is_returned_shown_and_sent_as_an_event(home: Path) -> None:
    log_requests(home, 50, ms=35)
    (broken,) = asyncio.run(watch())
    assert broken == f"{NAME}-v1 (stable): p99 35.0 ms, promised 20 ms"
    page = Artifact.get(f"{NAME}-latency")
    assert page is not None
    assert f"**broken:** {broken}" in page.data
    event = asyncio.run(_event())
    assert event["resource"]["prefect.resource.id"] == f"serin.release.{NAME}-v1"
    assert event["payload"]["value"] == 35.0
    assert event["payload"]["limit"] == 20.0


def test_old_requests_and_other_models_do_not_count(home: Path) -> None:
    log_requests(home, 50, ms=35, age_s=1000)
    log_requests(home, 50, ms=35, model="another")
    assert asyncio.run(watch()) == []


def test_a_model_without_traffic_needs_no_log() -> None:
    assert asyncio.run(watch()) == []


def test_pages_of_more_than_a_day_are_dropped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "_PAGES_KEPT", 1)
    log_requests(home, 50, ms=4)
    asyncio.run(watch())
    asyncio.run(watch())
    assert asyncio.run(_pages()) == 1


async def _pages() -> int:
    async with get_client() as client:
        found = await client.read_artifacts()
        return sum(artifact.key == f"{NAME}-latency" for artifact in found)


async def _event() -> dict[str, object]:
    """Events arrive by another way than the calls that follow them: waited for, not long."""
    wanted = EventFilter(event=EventNameFilter(name=[BROKEN_PROMISE])).model_dump(mode="json")
    async with get_client() as client:
        for _ in range(100):
            response = await client.request("POST", "/events/filter", json={"filter": wanted})
            if found := response.json()["events"]:
                return found[0]
            await asyncio.sleep(0.2)
    raise AssertionError("no event within 20 s")
