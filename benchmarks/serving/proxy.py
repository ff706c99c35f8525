"""A plain Envoy without Serin's filters, placed in front of a peer."""

from __future__ import annotations

from typing import Any

from serin.serving.envoy.api_types import CONNECTION_MANAGER, ROUTER

_NAME = "bare"


def bare_proxy(port: int, to_port: int) -> dict[str, Any]:
    """Starts an Envoy that forwards every request: no log, no keys, no checks, no retries."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": _NAME}}
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": _NAME,
        "route_config": {"virtual_hosts": [{"name": _NAME, "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": ROUTER}}],
    }
    listener = {
        "name": _NAME,
        "address": _loopback(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _loopback(to_port)}}]}]
    cluster = {
        "name": _NAME,
        "type": "STATIC",
        "load_assignment": {"cluster_name": _NAME, "endpoints": endpoints},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _loopback(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
