"""Envoy's start-up document: the listeners, the logs, the filters. Pure.

Models come and go through CDS and RDS files only: a change of a listener drains its connections. The public listener,
the first one, is a file that Envoy follows (LDS), too, so that TLS can be switched on while Envoy runs.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serin.formats.serving.request import CLIENT_ID_BYTES
from serin.serving.envoy.access_logs import refusal_logs, request_log
from serin.serving.envoy.api_types import (
    BUFFER,
    CONNECTION_MANAGER,
    EARLY_HEADER_MUTATION,
    HEADER_MUTATION,
    MATCHED,
    REQUEST_FILTER,
    REQUEST_HEADER,
    REVERSE_BRIDGE,
    ROUTER,
    SKIP,
    STREAM_IDLE_S,
    drain_filter,
    followed,
    module_filter,
)
from serin.serving.envoy.fixed_routes import HEALTH_CLUSTER, NOT_READY_PATH
from serin.serving.envoy.guard import keys_filters, tls_socket
from serin.serving.envoy.overload import CONNECTION_BUFFER_BYTES, overload_manager
from serin.serving.envoy.rates import rate_filters
from serin.serving.envoy.routes import ROUTES_NAME


def local_replies() -> Document:
    """Returns the connection manager's `local_reply_config`; the first mapper that matches is used."""
    return {"mappers": [_not_implemented(), _overloaded(), _come_back(), *_too_many(), _json_errors()]}


def _not_implemented() -> Document:
    """Maps a transfer encoding that Envoy does not know to a client error."""
    status = {
        "comparison": {"op": "EQ", "value": {"default_value": 501, "runtime_key": "serin.not_implemented"}}
    }
    text = {
        "json_format": {"error": "this transfer encoding is not known here"},
        "content_type": "application/json",
    }
    return {"filter": {"status_code_filter": status}, "status_code": 400, "body_format_override": text}


def _overloaded() -> Document:
    """Maps the 500 that Envoy gives for a request it drops for lack of memory."""
    status = {"comparison": {"op": "EQ", "value": {"default_value": 500, "runtime_key": "serin.overloaded"}}}
    text = {
        "json_format": {"error": "the gateway has no room for this request now; send it again"},
        "content_type": "application/json",
    }
    again = {**_come_back(), "status_code": 503, "body_format_override": text}
    return {**again, "filter": {"status_code_filter": status}}


def _too_many() -> list[Document]:
    """Says in words that a rate limit was reached; the filter that refuses adds retry-after. The first is for HTTP."""
    status = {"comparison": {"op": "EQ", "value": {"default_value": 429, "runtime_key": "serin.too_many"}}}
    text = {"inline_string": "too many requests for this caller or model; send fewer, or try again later"}
    plain = _json_errors(429)
    both = {"and_filter": {"filters": [{"status_code_filter": status}, plain["filter"]]}}
    return [{**plain, "filter": both, "body": text}, {"filter": {"status_code_filter": status}, "body": text}]


def _json_errors(first_status: int = 400) -> Document:
    """Formats Envoy's own answers like Triton's errors. In gRPC the text is the plain status message."""
    key = f"serin.json_errors_from_{first_status}"
    status = {"comparison": {"op": "GE", "value": {"default_value": first_status, "runtime_key": key}}}
    grpc = {
        "name": "content-type",
        "string_match": {"prefix": "application/grpc"},
        "invert_match": True,
        "treat_missing_header_as_empty": True,
    }
    return {
        "filter": {"and_filter": {"filters": [{"status_code_filter": status}, {"header_filter": {"header": grpc}}]}},
        "body_format_override": {
            "json_format": {"error": "%LOCAL_REPLY_BODY%"}, "content_type": "application/json",
        },
    }  # fmt: skip


def _come_back() -> Document:
    """Adds retry-after for overload or a release that is restarting. gRPC has its own status for this."""
    header = {
        "header": {"key": "retry-after", "value": "1"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    return {**_json_errors(503), "headers_to_add": [header]}


CLIENT_ID_HEADER = "x-serin-client-id"


# Envoy replaces x-request-id before the first filter runs, so the client's own is copied to another header before that.
# Logs and recorded requests have both.
def keep_client_id() -> Document:
    """Returns the step that copies the id. It first removes every header of Serin's and Envoy's that a client sets."""
    kept = {"key": CLIENT_ID_HEADER, "value": f"%REQ(X-REQUEST-ID):{CLIENT_ID_BYTES}%"}
    mutations = [
        {"remove_on_match": {"key_matcher": {"prefix": "x-serin-"}}},
        {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}},
        {"append": {"header": kept, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
    ]
    config = {"@type": EARLY_HEADER_MUTATION, "mutations": mutations}
    return {"name": "client_id", "typed_config": config}


def odd_id_filter() -> Document:
    """Returns the filter that removes a client's id unless it is printable ASCII: Triton's Python backend fails
    requests with other bytes in a header."""
    header = {"@type": REQUEST_HEADER, "header_name": CLIENT_ID_HEADER}
    plain = {
        "input": {"name": "id", "typed_config": header},
        "value_match": {"safe_regex": {"google_re2": {}, "regex": "[ -~]+"}},
    }
    skip = {"action": {"name": "skip", "typed_config": {"@type": SKIP}}}
    matchers = [{"predicate": {"single_predicate": plain}, "on_match": skip}]
    removal = {"mutations": {"request_mutations": [{"remove": CLIENT_ID_HEADER}]}}
    config = {
        "@type": MATCHED,
        "extension_config": {"name": "remove", "typed_config": {"@type": HEADER_MUTATION, **removal}},
        "xds_matcher": {"matcher_list": {"matchers": matchers}},
    }
    return {"name": "odd_id", "typed_config": config}


Document = dict[str, Any]

STAT_PREFIX = "gateway"
LOOPBACK = "127.0.0.1"

_PROTOBUF = "application/x-protobuf"
# ServerLiveResponse{live: true} and ServerReadyResponse{ready: true}, ServerReadyResponse{ready: false}
_TRUE_FIELD_1, _FALSE_FIELD_1 = (base64.b64encode(value).decode() for value in (b"\x08\x01", b"\x08\x00"))


def bootstrap(
    *,
    address: str,
    port: int,
    admin: Path,
    health: Path,
    log: Path,
    refusals: Path,
    refusal_rate: Path,
    inside: Path,
    listener: Path,
    clusters: Path,
    routes: Path,
    issuers: Path,
    keys: Path,
    caller_rates: Path,
    model_rates: Path,
    tls: Path | None,
    max_request_bytes: int,
    max_connections: int,
    max_heap_bytes: int,
    request_filter: Path | None = None,
    http_filters: Sequence[Document] = (),
) -> Document:
    """`listener`, `clusters`, `routes`, `issuers`, `keys`, `caller_rates`, `model_rates`, `tls` and `refusal_rate` are
    files, each in its own folder, whose renames Envoy follows. `log` and `refusals` are the two logs it writes
    (access_logs.py). The caller moves the first listener of the document to `listener`.
    `request_filter`: the library that reads requests before they are routed (native/request_filter.py). Without it the
    gateway listens on loopback whatever `address` says, and gRPC calls find no route: the filter reads their model.
    `inside` is a socket for the owner of this machine's stack: the same gateway without TLS, keys and rate limits.
    """
    limits = rate_filters(caller_rates, model_rates)
    last, unlimited = (_http_filters(max_request_bytes, request_filter, each) for each in (limits, []))
    logs = [request_log(log), *refusal_logs(refusals, refusal_rate)]
    # The request filter answers what the keys refuse, unless filters of the user are between them.
    checks = [*keys_filters(keys, issuers, answers=not request_filter or bool(http_filters)), *http_filters]
    cleaned = [] if request_filter else _own_headers()  # the request filter does this, too, and costs less
    guarded = _connection_manager(logs, routes, [*cleaned, *checks, *last])
    private = _inside_listener(inside, _connection_manager(logs, routes, [*cleaned, *unlimited]))
    # Nothing keeps away the requests that end Triton 2.51 then; but who can reach loopback can reach Triton itself.
    public = _public_listener(address if request_filter else LOOPBACK, port, guarded, tls)
    listeners = [public, private, _health_listener(health)]
    return {
        "node": {"id": "gateway", "cluster": "serin"},
        "admin": {"address": _socket(admin)},
        "overload_manager": overload_manager(max_heap_bytes=max_heap_bytes, max_connections=max_connections),
        "dynamic_resources": {"cds_config": followed(clusters), "lds_config": followed(listener)},
        "static_resources": {"listeners": listeners, "clusters": [_health_cluster(health)]},
    }


def _inside_listener(socket: Path, manager: Document) -> Document:
    return {"name": "inside", "address": _socket(socket), "filter_chains": [{"filters": [manager]}]}


def _public_listener(address: str, port: int, manager: Document, tls: Path | None) -> Document:
    chain: Document = {"filters": [manager]}
    if tls is not None:
        chain["transport_socket"] = tls_socket(tls)
    return {
        "name": STAT_PREFIX,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "enable_reuse_port": False,  # else a second Envoy could take half of the connections, unseen
        "connection_balance_config": {"exact_balance": {}},
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _connection_manager(logs: list[Document], routes: Path, http_filters: list[Document]) -> Document:
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "server_name": "serin",
        # Every client is an outsider, also on this machine: the x-envoy-* and x-request-id that it sends do not count.
        "use_remote_address": True,
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "192.0.2.0", "prefix_len": 32}]},
        "always_set_request_id_in_response": True,
        "early_header_mutation_extensions": [keep_client_id()],
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": 8,  # Triton hangs up on more
        "request_headers_timeout": "10s",
        "request_timeout": "60s",  # to receive a request
        "stream_idle_timeout": f"{STREAM_IDLE_S:g}s",
        "common_http_protocol_options": {"idle_timeout": "900s"},
        "http2_protocol_options": {"max_concurrent_streams": 1024},
        "rds": {"route_config_name": ROUTES_NAME, "config_source": followed(routes)},
        "http_filters": http_filters,
        "access_log": logs,
        "local_reply_config": local_replies(),
    }
    return {"name": "http", "typed_config": manager}


def _own_headers() -> list[Document]:
    """Removes binary headers, which end a gRPC call if they are not base64. (Those that only Serin and Envoy set are
    gone already: client_ids.py.)"""
    removal = {"remove_on_match": {"key_matcher": {"suffix": "-bin"}}}
    config = {"@type": HEADER_MUTATION, "mutations": {"request_mutations": [removal]}}
    return [{"name": "own_headers", "typed_config": config}, odd_id_filter()]


def _http_filters(
    max_request_bytes: int, request_filter: Path | None, limits: Sequence[Document]
) -> list[Document]:
    # Whole bodies with a length: Triton 2.51 has holes around chunked ones, and a second try needs the body.
    buffer = {"@type": BUFFER, "max_request_bytes": max_request_bytes}
    bridge = {"@type": REVERSE_BRIDGE, "content_type": _PROTOBUF, "withhold_grpc_frames": True}
    return [
        drain_filter(),
        {"name": "buffer", "typed_config": buffer},
        *([module_filter(REQUEST_FILTER, request_filter)] if request_filter else []),
        *limits,
        {"name": "bridge", "typed_config": bridge},
        {"name": "router", "typed_config": {"@type": ROUTER, "suppress_envoy_headers": True}},
    ]


def _health_listener(path: Path) -> Document:
    """Answers ServerLive and ServerReady for the gateway: a direct response cannot carry a gRPC message."""
    routes = [
        {"match": match, "direct_response": {"status": 200, "body": {"inline_bytes": answer}}}
        for match, answer in (({"path": NOT_READY_PATH}, _FALSE_FIELD_1), ({"prefix": "/"}, _TRUE_FIELD_1))
    ]
    header = {
        "header": {"key": "content-type", "value": _PROTOBUF},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": HEALTH_CLUSTER,
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": routes, "response_headers_to_add": [header]}
            ]
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": ROUTER}}],
    }
    return {
        "name": HEALTH_CLUSTER,
        "address": _socket(path),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _health_cluster(path: Path) -> Document:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(path)}}}}]}]
    return {
        "name": HEALTH_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": HEALTH_CLUSTER, "endpoints": endpoints},
    }


def _socket(path: Path) -> Document:
    return {"pipe": {"path": str(path), "mode": 0o600}}
