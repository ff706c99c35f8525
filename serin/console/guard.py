"""What every request to the console must pass, and what every answer carries: hosts, origins, headers, few attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from pathlib import Path
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
_UNDELAYED, _LONGEST_S, _FORGOTTEN_S = 4, 900.0, 3600.0
_MOST_SOURCES = 10_000


class Guard:
    """Refuses requests for other hosts (a page elsewhere may point its name at this machine) and sets the headers.

    What comes through the stack's gateway came with TLS, for a host of its certificate: no other name gets there.
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
        headers = Headers(scope=scope)
        server = scope.get("server")  # without a port: the gateway's unix socket, which nobody else can open
        by_gateway = server is not None and server[1] is None
        if by_gateway:
            scope = {**scope, "scheme": "https", "client": (headers.get("x-forwarded-for", "?"), 0)}
        elif _host(headers.get("host", "")) not in self._hosts and scope["path"] != "/health":
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
                if self._secure or by_gateway:
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
    """Failed logins by source. From the fifth on, further ones of that source are refused for a time that doubles with
    each: 2 s at first, 15 minutes at most. It says nothing about a right secret, which is never refused: no source is
    sure to be one person."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sources: dict[str, tuple[int, float]] = {}  # failures, end of the wait; the oldest first

    def fail(self, source: str) -> float:
        """Counts a failed login. Returns how many seconds it came too early: it does not count then; 0: it did not."""
        now = self._clock()
        failures, until = self._sources.pop(source, (0, now))
        early_s = max(0.0, until - now)
        if not early_s:
            failures = 1 if now - until >= _FORGOTTEN_S else failures + 1
            doubled = failures - _UNDELAYED
            until = now + (0.0 if doubled <= 0 else min(2.0 ** min(doubled, 64), _LONGEST_S))
        self._sources[source] = failures, until
        if len(self._sources) > _MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        return early_s


def source_of(request: Request) -> str:
    """Returns who sends a request: the address, or the network of an IPv6 one (a host has 2^64 addresses there). Users
    of this machine share one address and are distinguished by their account."""
    client, server = request.client, request.scope.get("server")
    try:
        address = ip_address(client.host if client else "")
    except ValueError:
        return client.host if client else "?"
    if address.is_loopback and client and server and server[1]:
        account = _account(client.port, server[1])
        return str(address) if account is None else f"{address} (user {account})"
    return str(ip_network((address, 64), strict=False)) if address.version == 6 else str(address)


def _account(client_port: int, server_port: int) -> int | None:
    """Returns the user id of the process at the other end of a connection on this machine, as the kernel has it."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
        except OSError:
            continue
        for _, local, remote, _, _, _, _, user, _, inode, *_ in rows:
            ports = (local.rpartition(":")[2], remote.rpartition(":")[2])
            if ports == (f"{client_port:04X}", f"{server_port:04X}") and inode != "0":  # 0: it was closed
                return int(user)
    return None


def _host(named: str) -> str:
    """Returns a host without its port."""
    if named.startswith("["):
        return named.partition("]")[0] + "]"
    return named.partition(":")[0].lower()
