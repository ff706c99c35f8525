"""What every request to the console must pass, and what every answer carries: hosts, origins, headers, few attempts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer a browser hides where a form was sent from
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LOCAL: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_TRIES, _WINDOW_S, _MOST_CLIENTS = 5, 60.0, 10_000


class Guard:
    """Refuses requests for other hosts (a page elsewhere may point its name at this machine) and sets the headers.

    `url`: the address for people when it is not that of the port.
    """

    def __init__(self, app: ASGIApp, *, url: str | None, address: str) -> None:
        self._app = app
        named = {_host(urlsplit(url).netloc)} if url else set()
        self._hosts = _LOCAL | named | {address}
        self._secure = url is not None and url.startswith("https://")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = _host(Headers(scope=scope).get("host", ""))
        if host not in self._hosts and scope["path"] != "/health":
            refusal = PlainTextResponse(
                "this host is not the console's; name it with `url` in the file of SERIN_CONSOLE", 421
            )
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers["content-security-policy"] = _POLICY
                headers.setdefault("cache-control", "no-store")
                if self._secure:
                    headers["strict-transport-security"] = "max-age=31536000"
            await send(message)

        await self._app(scope, receive, send_with_headers)


def from_own_page(request: Request, url: str | None) -> bool:
    """Returns whether a request that changes something can come from a page of the console.

    Browsers say where a form was sent from. What is not a browser sends neither header, and has no cookie that a page
    elsewhere could use.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is not None:
        own = {f"{request.url.scheme}://{headers.get('host', '')}", *((url,) if url else ())}
        return origin in own
    return headers.get("sec-fetch-site", "same-origin") == "same-origin"


class Attempts:
    """Counts failed logins by address: after five in a minute further ones are refused for the rest of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[str, deque[float]] = {}

    def wait_s(self, client: str) -> float:
        """Returns how long the client must wait before its next attempt; 0: it need not."""
        failed = self._recent(client)
        return max(0.0, failed[0] + _WINDOW_S - self._clock()) if len(failed) >= _TRIES else 0.0

    def fail(self, client: str) -> None:
        if len(self._failed) >= _MOST_CLIENTS:
            self._failed.clear()
        self._failed.setdefault(client, deque(maxlen=_TRIES)).append(self._clock())

    def _recent(self, client: str) -> deque[float]:
        failed = self._failed.get(client, deque())
        while failed and failed[0] + _WINDOW_S <= self._clock():
            failed.popleft()
        return failed


def _host(named: str) -> str:
    """Returns a host without its port."""
    if named.startswith("["):
        return named.partition("]")[0] + "]"
    return named.partition(":")[0].lower()
