"""Envoy's start-up document: the listeners, the logs, the filters. Pure.

Models come and go through CDS and RDS files only: a change of a listener drains its connections. The public listener,
the first one, is a file that Envoy follows (LDS), too, so that TLS can be switched on while Envoy runs.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from serin.formats.serving.request import CLIENT_ID_BYTES
from serin.serving.envoy.access_logs import refusal_logs, request_log
from serin.serving.envoy.api_types import (
    BUFFER,
    CONNECTION_BUFFER_BYTES,
    EARLY_HEADER_MUTATION,
    HEADER_MUTATION,
    RECEIVE_S,
    REQUEST_HEADER,
    REVERSE_BRIDGE,
    STREAM_IDLE_S,
    Document,
    Kind,
    cluster,
    drain_filter,
    extension,
    followed,
    header_matches,
    listener,
    router,
    set_header,
    skipped_filter,
    socket_address,
)
from serin.serving.envoy.fixed_routes import HEALTH_CLUSTER, NOT_READY_PATH, WINDOWS_CLUSTER
from serin.serving.envoy.guard import keys_filters, tls_socket
from serin.serving.envoy.rates import rate_filters
from serin.serving.envoy.routes import ROUTES_NAME

STAT_PREFIX = "gateway"
LOOPBACK = "127.0.0.1"
CLIENT_ID_HEADER = "x-serin-client-id"

_PROTOBUF = "application/x-protobuf"
# ServerLiveResponse{live: true} and ServerReadyResponse{ready: true}, ServerReadyResponse{ready: false}
_TRUE_FIELD_1, _FALSE_FIELD_1 = (base64.b64encode(value).decode() for value in (b"\x08\x01", b"\x08\x00"))


def bootstrap(
    *,
    address: str,
    port: int,
    admin: Path,
    inside: Path,
    log: Path,
    refusals: Path,
    file: Callable[[Kind], Path],
    tls: bool,
    max_request_bytes: int,
    overload: Document,
    request_filter: Document | None = None,
    http_filters: Sequence[Document] = (),
) -> Document:
    """`file` says where each document is that Envoy follows. `log` and `refusals` are the two logs it writes
    (access_logs.py). The caller moves the first listener of the document to its file.
    `request_filter`: the filter that reads requests before they are routed (native/request_filter.py). Without it the
    gateway listens on loopback whatever `address` says, and gRPC calls find no route: the filter reads their model.
    `inside` is a socket for the owner of this machine's stack: the same gateway without TLS, keys and rate limits.
    """
    limits = rate_filters(file("caller-rates"), file("model-rates"))
    last, unlimited = (_http_filters(max_request_bytes, request_filter, each) for each in (limits, []))
    logs = [request_log(log), *refusal_logs(refusals, file("refusal-rate"))]
    # The request filter answers what the keys refuse, unless filters of the user are between them.
    answers = not request_filter or bool(http_filters)
    checks = [*keys_filters(file("keys"), file("issuers"), answers=answers), *http_filters]
    cleaned = [] if request_filter else _own_headers()  # the request filter does this, too, and costs less
    # Nothing keeps away the requests that end Triton 2.51 then; but who can reach loopback can reach Triton itself.
    public = listener(
        STAT_PREFIX,
        socket_address(address if request_filter else LOOPBACK, port),
        _connection_manager(logs, file("routes"), [*cleaned, *checks, *last]),
        tls_socket(file("tls")) if tls else None,
        enable_reuse_port=False,  # else a second Envoy could take half of the connections, unseen
        connection_balance_config={"exact_balance": {}},
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
    )
    unguarded = _connection_manager(logs, file("routes"), [*cleaned, *unlimited])
    return {
        "node": {"id": "gateway", "cluster": "serin"},
        "admin": {"address": _socket(admin)},
        "overload_manager": overload,
        "dynamic_resources": _followed_documents(file),
        "static_resources": _static([public, listener("inside", _socket(inside), unguarded)], admin),
    }


def _static(listeners: list[Document], admin: Path) -> Document:
    """The listeners and one for health checks, and the processes of this machine that the gateway asks."""
    health = admin.with_name(f"{admin.stem}-health.sock")
    sockets = {HEALTH_CLUSTER: health, WINDOWS_CLUSTER: admin.with_name(f"{WINDOWS_CLUSTER}.sock")}
    clusters = [cluster(name, {"address": {"pipe": {"path": str(path)}}}) for name, path in sockets.items()]
    return {"listeners": [*listeners, _health_listener(health)], "clusters": clusters}


def _followed_documents(file: Callable[[Kind], Path]) -> Document:
    return {"cds_config": followed(file("clusters")), "lds_config": followed(file("listener"))}


def _connection_manager(logs: list[Document], routes: Path, http_filters: list[Document]) -> Document:
    return {
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "server_name": "serin",
        # Every client is an outsider, also on this machine: the x-envoy-* and x-request-id that it sends do not count.
        "use_remote_address": True,
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "192.0.2.0", "prefix_len": 32}]},
        "always_set_request_id_in_response": True,
        "early_header_mutation_extensions": [_keep_client_id()],
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": 8,  # Triton hangs up on more
        "request_headers_timeout": "10s",
        "request_timeout": f"{RECEIVE_S:g}s",
        "stream_idle_timeout": f"{STREAM_IDLE_S:g}s",
        "common_http_protocol_options": {"idle_timeout": "900s"},
        "http2_protocol_options": {"max_concurrent_streams": 1024},
        "rds": {"route_config_name": ROUTES_NAME, "config_source": followed(routes)},
        "http_filters": http_filters,
        "access_log": logs,
        "local_reply_config": _local_replies(),
    }


def _local_replies() -> Document:
    """Returns the connection manager's `local_reply_config`; the first mapper that matches is used."""
    retry = {"headers_to_add": [set_header("retry-after", "1")]}
    limited, plain = _status("EQ", 429, "too_many"), _json_errors(429)
    limited_text = {
        "inline_string": "too many requests for this caller or model; send fewer, or try again later"
    }
    mappers = [
        {  # a transfer encoding that Envoy does not know
            "filter": _status("EQ", 501, "not_implemented"),
            "status_code": 400,
            "body_format_override": _json_error("this transfer encoding is not known here"),
        },
        {  # Envoy gives 500 for a request that it drops for lack of memory
            "filter": _status("EQ", 500, "overloaded"),
            "status_code": 503,
            "body_format_override": _json_error(
                "the gateway has no room for this request now; send it again"
            ),
            **retry,
        },
        # Overload, or a release that is restarting. gRPC has its own status for this.
        {**_json_errors(503), **retry},
        # A rate limit was reached; the filter that refuses adds retry-after. The first is for HTTP.
        {**plain, "filter": {"and_filter": {"filters": [limited, plain["filter"]]}}, "body": limited_text},
        {"filter": limited, "body": limited_text},
        _json_errors(400),
    ]
    return {"mappers": mappers}


def _status(comparison: str, status: int, name: str) -> Document:
    value = {"default_value": status, "runtime_key": f"serin.{name}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _json_error(text: str) -> Document:
    return {"json_format": {"error": text}, "content_type": "application/json"}


def _json_errors(first_status: int) -> Document:
    """Formats Envoy's own answers like Triton's errors. In gRPC the text is the plain status message."""
    grpc = {
        "name": "content-type",
        "string_match": {"prefix": "application/grpc"},
        "invert_match": True,
        "treat_missing_header_as_empty": True,
    }
    status = _status("GE", first_status, f"json_errors_from_{first_status}")
    return {
        "filter": {"and_filter": {"filters": [status, {"header_filter": {"header": grpc}}]}},
        "body_format_override": _json_error("%LOCAL_REPLY_BODY%"),
    }


# Envoy replaces x-request-id before the first filter runs, so the client's own is copied to another header before that.
# Logs and recorded requests have both.
def _keep_client_id() -> Document:
    """Returns the step that copies the id. It first removes every header of Serin's and Envoy's that a client sets."""
    mutations = [
        {"remove_on_match": {"key_matcher": {"prefix": "x-serin-"}}},
        {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}},
        {"append": set_header(CLIENT_ID_HEADER, f"%REQ(X-REQUEST-ID):{CLIENT_ID_BYTES}%")},
    ]
    return extension("client_id", EARLY_HEADER_MUTATION, mutations=mutations)


def _own_headers() -> list[Document]:
    """Removes binary headers, which end a gRPC call if they are not base64, and a client's id unless it is printable
    ASCII: Triton's Python backend fails requests with other bytes in a header."""
    binary = {"remove_on_match": {"key_matcher": {"suffix": "-bin"}}}
    removal = {"request_mutations": [{"remove": CLIENT_ID_HEADER}]}
    printable = {"safe_regex": {"google_re2": {}, "regex": "[ -~]+"}}
    return [
        extension("own_headers", HEADER_MUTATION, mutations={"request_mutations": [binary]}),
        skipped_filter(
            "odd_id",
            extension("remove", HEADER_MUTATION, mutations=removal),
            unless=header_matches(REQUEST_HEADER, CLIENT_ID_HEADER, printable),
        ),
    ]


def _http_filters(
    max_request_bytes: int, request_filter: Document | None, limits: Sequence[Document]
) -> list[Document]:
    return [
        drain_filter(),
        # Whole bodies with a length: Triton 2.51 has holes around chunked ones, and a second try needs the body.
        extension("buffer", BUFFER, max_request_bytes=max_request_bytes),
        *([request_filter] if request_filter else []),
        *limits,
        *(
            [_windows_filter(request_filter)] if request_filter else []
        ),  # after the limits: refused requests do not count
        extension("bridge", REVERSE_BRIDGE, content_type=_PROTOBUF, withhold_grpc_frames=True),
        router(suppress_envoy_headers=True),
    ]


def _windows_filter(request_filter: Document) -> Document:
    """Returns the filter that adds windows over past events: the same library under another name."""
    settings = {**request_filter["typed_config"], "filter_name": WINDOWS_CLUSTER}
    return {**request_filter, "name": WINDOWS_CLUSTER, "typed_config": settings}


def _health_listener(path: Path) -> Document:
    """Answers ServerLive and ServerReady for the gateway: a direct response cannot carry a gRPC message."""
    routes = [
        {"match": match, "direct_response": {"status": 200, "body": {"inline_bytes": answer}}}
        for match, answer in (({"path": NOT_READY_PATH}, _FALSE_FIELD_1), ({"prefix": "/"}, _TRUE_FIELD_1))
    ]
    headers = [set_header("content-type", _PROTOBUF)]
    host = {"name": "all", "domains": ["*"], "routes": routes, "response_headers_to_add": headers}
    manager = {
        "stat_prefix": HEALTH_CLUSTER,
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [router()],
    }
    return listener(HEALTH_CLUSTER, _socket(path), manager)


def _socket(path: Path) -> Document:
    return {"pipe": {"path": str(path), "mode": 0o600}}
