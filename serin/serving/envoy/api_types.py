"""Names of Envoy's extension types, and the parts that bootstrap and routes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

_V3 = "type.googleapis.com/envoy.extensions"

CONNECTION_MANAGER = f"{_V3}.filters.network.http_connection_manager.v3.HttpConnectionManager"
FILE_LOG = f"{_V3}.access_loggers.file.v3.FileAccessLog"
LOG_RATE = f"{_V3}.access_loggers.filters.process_ratelimit.v3.ProcessRateLimitFilter"
STATS_LOG = f"{_V3}.access_loggers.stats.v3.Config"
BUFFER = f"{_V3}.filters.http.buffer.v3.Buffer"
BUFFER_PER_ROUTE = f"{_V3}.filters.http.buffer.v3.BufferPerRoute"
LUA = f"{_V3}.filters.http.lua.v3.Lua"
LUA_PER_ROUTE = f"{_V3}.filters.http.lua.v3.LuaPerRoute"
REVERSE_BRIDGE = f"{_V3}.filters.http.grpc_http1_reverse_bridge.v3.FilterConfig"
REVERSE_BRIDGE_PER_ROUTE = f"{_V3}.filters.http.grpc_http1_reverse_bridge.v3.FilterConfigPerRoute"
DYNAMIC_MODULE = f"{_V3}.filters.http.dynamic_modules.v3.DynamicModuleFilter"
HEADER_MUTATION = f"{_V3}.filters.http.header_mutation.v3.HeaderMutation"
EARLY_HEADER_MUTATION = f"{_V3}.http.early_header_mutation.header_mutation.v3.HeaderMutation"
JWT = f"{_V3}.filters.http.jwt_authn.v3.JwtAuthentication"
RATE_LIMIT = f"{_V3}.filters.http.local_ratelimit.v3.LocalRateLimit"
ROUTER = f"{_V3}.filters.http.router.v3.Router"
MATCHED = "type.googleapis.com/envoy.extensions.common.matching.v3.ExtensionWithMatcher"
SKIP = f"{_V3}.filters.common.matcher.action.v3.SkipFilter"
REQUEST_HEADER = "type.googleapis.com/envoy.type.matcher.v3.HttpRequestHeaderMatchInput"
RESPONSE_HEADER = "type.googleapis.com/envoy.type.matcher.v3.HttpResponseHeaderMatchInput"
UPSTREAM_CODEC = f"{_V3}.filters.http.upstream_codec.v3.UpstreamCodec"
MAX_CONNECTIONS = f"{_V3}.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
FIXED_HEAP = f"{_V3}.resource_monitors.fixed_heap.v3.FixedHeapConfig"
SCALED_TIMERS = "type.googleapis.com/envoy.config.overload.v3.ScaleTimersOverloadActionConfig"
HTTP_OPTIONS = f"{_V3}.upstreams.http.v3.HttpProtocolOptions"
AGGREGATE = f"{_V3}.clusters.aggregate.v3.ClusterConfig"
PREVIOUS_PRIORITIES = f"{_V3}.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig"
PREVIOUS_HOSTS = f"{_V3}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
DOWNSTREAM_TLS = f"{_V3}.transport_sockets.tls.v3.DownstreamTlsContext"
UPSTREAM_TLS = f"{_V3}.transport_sockets.tls.v3.UpstreamTlsContext"
SECRET = f"{_V3}.transport_sockets.tls.v3.Secret"
LOG_BUCKET = "type.googleapis.com/envoy.type.v3.TokenBucket"
TEXT = "type.googleapis.com/google.protobuf.StringValue"
RESOURCE = "type.googleapis.com/envoy.service.discovery.v3.Resource"
EXTENSION = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
LISTENER = "type.googleapis.com/envoy.config.listener.v3.Listener"
CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
FILTER_PER_ROUTE = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
ROUTE_CONFIGURATION = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"

SERVICE = "/inference.GRPCInferenceService"
STREAM_IDLE_S = 300.0  # without a byte in either direction
RECEIVE_S = 60.0  # that a request may take to arrive
SOURCES = Path(__file__).parent  # of the Lua files
REQUEST_FILTER = "model_name"  # the filter's name, and of the metadata that routes have for it

Document = dict[str, Any]
Kind = Literal[
    "listener", "clusters", "routes", "issuers", "keys", "caller-rates", "model-rates", "tls", "refusal-rate",
    "peer-routes", "peer-tls", "peer-ca",
]  # fmt: skip
"""The documents that Envoy follows as files."""

CONNECTION_BUFFER_BYTES = 128 << 10  # of what a slow peer has not taken yet, on each side of the gateway
DRAIN_NAME = "drain"


def extension(name: str, kind: str, **settings: Any) -> Document:
    """Returns a named extension of Envoy's of one of the types above."""
    return {"name": name, "typed_config": {"@type": kind, **settings}}


def router(**settings: Any) -> Document:
    """Returns the last filter of every chain."""
    return extension("router", ROUTER, **settings)


def set_header(key: str, value: str) -> Document:
    """Returns a header that replaces any of its name."""
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def socket_address(host: str, port: int) -> Document:
    return {"socket_address": {"address": host, "port_value": port}}


def listener(
    name: str, address: Document, manager: Document, tls: Document | None = None, **settings: Any
) -> Document:
    """Returns a listener with one chain: `manager` is its connection manager's settings, `tls` its transport socket."""
    chain: Document = {"filters": [extension("http", CONNECTION_MANAGER, **manager)]}
    if tls is not None:
        chain["transport_socket"] = tls
    return {"name": name, "address": address, "filter_chains": [chain], **settings}


def cluster(name: str, *endpoints: Document, release: str = "", **settings: Any) -> Document:
    """Returns a cluster of these endpoints. `release`: which answers there, for the records of its answers."""
    known = {"metadata": {"filter_metadata": {"serin": {"release": release}}}} if release else {}
    places = [{"lb_endpoints": [{"endpoint": endpoint, **known} for endpoint in endpoints]}]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": places},
        **settings,
    }


def header_matches(kind: str, header: str, value: Document) -> Document:
    """Returns the predicate that a header has such a value. `kind`: REQUEST_HEADER or RESPONSE_HEADER."""
    header_input = extension("header", kind, header_name=header)
    return {"single_predicate": {"input": header_input, "value_match": value}}


def skipped_filter(name: str, inner: Document, *, unless: Document) -> Document:
    """Returns the filter `inner`, which is skipped where the predicate `unless` holds."""
    matchers = [{"predicate": unless, "on_match": {"action": extension("skip", SKIP)}}]
    return extension(
        name, MATCHED, extension_config=inner, xds_matcher={"matcher_list": {"matchers": matchers}}
    )


def script_filter(name: str, file: str, *, unless: Document) -> Document:
    """Returns a Lua filter that is skipped where the predicate `unless` holds."""
    source = {"inline_string": (SOURCES / file).read_text()}
    return skipped_filter(name, extension("script", LUA, default_source_code=source), unless=unless)


def module_filter(name: str, library: Path, settings: str = "") -> Document:
    """Returns a filter in a shared library, which Envoy loads when it starts and which reads `settings`."""
    module = {"module": {"local": {"filename": str(library)}}}
    given = {"filter_config": {"@type": TEXT, "value": settings}} if settings else {}
    return extension(name, DYNAMIC_MODULE, dynamic_module_config=module, filter_name=name, **given)


def followed(path: Path) -> Document:
    """Returns a file that Envoy reads again when something is renamed into its folder."""
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": str(path), "watched_directory": {"path": str(path.parent)}},
    }


# An answer that is sent while the body still arrives makes Envoy reset an HTTP/2 stream and close an HTTP/1.1
# connection, and some clients report that instead of the answer. The filter is a script that runs on the routes that
# enable it.
def longest_read(max_request_bytes: int) -> int:
    """Returns the length up to which a body is still read when it is refused as too large."""
    return 8 * max_request_bytes


def drain_script() -> str:
    """Returns the script that defines the function drain."""
    return (SOURCES / "drain.lua").read_text()


def drain_filter() -> Document:
    """Returns the filter, placed before the buffer that waits for the body. It runs on the routes that enable it."""
    lines = (
        drain_script(),
        "function envoy_on_request(handle)",
        '  handle:headers():remove("inference-header-content-length")  -- it has no meaning without the body',
        "  drain(handle)",
        "end",
    )
    source = {"inline_string": "\n".join(lines)}
    return extension(DRAIN_NAME, LUA, source_codes={DRAIN_NAME: source})
