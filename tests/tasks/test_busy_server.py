"""How a client of Prefect takes the refusals of a busy server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    temporary_settings,
)

from tasks.busy_server import client_that_repeats_soon, repeat_soon, repeat_while_busy


class Busy(BaseHTTPRequestHandler):
    """Refuses the first requests."""

    refusals = 0

    def do_GET(self) -> None:
        refused = type(self).refusals > 0
        type(self).refusals -= 1
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_refused_request_of_prefect_s_client_is_repeated(url: str) -> None:
    Busy.refusals = 2
    settings = {
        PREFECT_API_URL: f"{url}/api",
        PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False,
        PREFECT_CLIENT_MAX_RETRIES: 2,
    }

    async def ask() -> int:
        async with client_that_repeats_soon() as client:
            return (await client.hello()).status_code

    with temporary_settings(settings):
        assert asyncio.run(ask()) == 200
    assert Busy.refusals == -1


def test_pauses_grow_with_the_refusals_of_a_request(url: str) -> None:
    Busy.refusals = 2

    async def ask() -> list[str | None]:
        async with httpx.AsyncClient(event_hooks={"response": [repeat_soon]}) as client:
            request = client.build_request("GET", url)
            return [(await client.send(request)).headers.get("Retry-After") for _ in range(3)]

    assert asyncio.run(ask()) == ["0.05", "0.2", None]


@pytest.mark.parametrize(("within_s", "left"), [(60.0, -1), (-1.0, 2)])
def test_a_request_is_repeated_after_its_client_gave_up(url: str, within_s: float, left: int) -> None:
    Busy.refusals = 3
    settings = {
        PREFECT_API_URL: f"{url}/api",
        PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False,
        PREFECT_CLIENT_MAX_RETRIES: 0,
    }

    async def ask() -> int:
        async with client_that_repeats_soon() as client:
            return (await repeat_while_busy(client.hello, within_s=within_s)).status_code

    with temporary_settings(settings):
        if left < 0:
            assert asyncio.run(ask()) == 200
        else:
            with pytest.raises(PrefectHTTPStatusError, match="503"):
                asyncio.run(ask())
    assert Busy.refusals == left
