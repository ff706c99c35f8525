"""A plain Envoy without Serin's filters, placed in front of a peer."""

from __future__ import annotations

from typing import Any

from serin.serving.envoy.api_types import CONNECTION_MANAGER, ROUTER

_NAME = "bare"


def bare_proxy(port: int, to_port: int) -> dict[str, Any]:
    """Starts an Envoy that forwards every request: no log, no keys, no checks, no retries."""
    listener = _listener(port, {"route": {"cluster": _NAME}})
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _loopback(to_port)}}]}]
    cluster = {
        "name": _NAME,
        "type": "STATIC",
        "load_assignment": {"cluster_name": _NAME, "endpoints": endpoints},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def plain_answer(port: int) -> dict[str, Any]:
    """Returns a listener for such an Envoy that answers every request itself, with nothing in it."""
    return _listener(port, {"direct_response": {"status": 200}})


def _listener(port: int, what: dict[str, Any]) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, **what}
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": _NAME,
        "route_config": {"virtual_hosts": [{"name": _NAME, "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": ROUTER}}],
    }
    return {
        "name": f"{_NAME}-{port}",
        "address": _loopback(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _loopback(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
