"""The listener through which other machines reach the stack's pages: the console, and Prefect's API below /api. Pure.

It speaks the gateway's TLS. Both servers require their own login. It has its own port: the console needs all paths of
its origin, and no page shares an origin with the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.serving.envoy.api_types import (
    CONNECTION_BUFFER_BYTES,
    Document,
    cluster,
    listener,
    router,
    set_header,
    socket_address,
)
from serin.serving.envoy.guard import tls_socket

PAGES = "pages"  # of the listener and its statistics

_CONSOLE, _PREFECT = "pages_console", "pages_prefect"
_IDLE = "3600s"  # pages are updated by a stream of events, and Prefect's clients keep sockets open
_NO_PAGE = "there is no such page here"
_CLIENT = set_header("x-forwarded-for", "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%")  # whatever it says


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the pages are offered, and what is behind them: the console's unix socket and the port of the stack's
    Prefect server on the loopback interface. None: it is not here."""

    address: str
    port: int
    console: Path | None
    prefect_port: int | None


def pages_listener(pages: Pages, tls: Path) -> Document:
    host = {"name": "all", "domains": ["*"], "routes": _routes(pages), "request_headers_to_add": [_CLIENT]}
    manager = {
        "stat_prefix": PAGES,
        "server_name": "serin",
        "use_remote_address": True,
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "192.0.2.0", "prefix_len": 32}]},
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "request_headers_timeout": "10s",
        "stream_idle_timeout": _IDLE,
        "common_http_protocol_options": {"idle_timeout": "900s"},
        "http2_protocol_options": {"max_concurrent_streams": 128},
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [router(suppress_envoy_headers=True)],
    }
    return listener(
        PAGES,
        socket_address(pages.address, pages.port),
        manager,
        tls_socket(tls),
        enable_reuse_port=False,
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
    )


def pages_clusters(pages: Pages) -> list[Document]:
    places: Document = {}
    if pages.console:
        places[_CONSOLE] = {"pipe": {"path": str(pages.console)}}
    if pages.prefect_port:
        places[_PREFECT] = socket_address("127.0.0.1", pages.prefect_port)
    return [
        cluster(name, {"address": address}, per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES)
        for name, address in places.items()
    ]


def _routes(pages: Pages) -> list[Document]:
    nothing = {"direct_response": {"status": 404, "body": {"inline_string": _NO_PAGE}}}
    prefect = {"route": {"cluster": _PREFECT, "timeout": "0s"}} if pages.prefect_port else nothing
    console = {"route": {"cluster": _CONSOLE, "timeout": "0s"}} if pages.console else nothing
    return [{"match": {"path_separated_prefix": "/api"}, **prefect}, {"match": {"prefix": "/"}, **console}]
