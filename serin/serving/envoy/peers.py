"""How gateways on several hosts reach each other's releases: the peer listener, its routes, clusters of peers. Pure.

A gateway sends a request to a peer where its own host has no release that answers. The peer forwards it to its release
and does nothing else: the first gateway has checked, routed and logged the request. The release is named by the
request's authority, which Envoy sets for each attempt: a retry may go to another release than the first attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from serin.serving.envoy.api_types import (
    BUFFER,
    CONNECTION_MANAGER,
    DOWNSTREAM_TLS,
    HTTP_OPTIONS,
    ROUTER,
    STREAM_IDLE_S,
    UPSTREAM_TLS,
    followed,
)
from serin.serving.envoy.overload import CONNECTION_BUFFER_BYTES
from serin.store.artifacts import Release

Document = dict[str, Any]

PEERS = "peers"  # of the listener, its statistics and its route table
PAIR_NAME, CA_NAME = "peer", "peer_ca"  # of the secrets

_NOT_HERE = "this release does not answer on this host"
_HEADERS_KB = 16  # what the public listener allows, and what it adds


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSecrets:
    """The files that Envoy follows: certificate with key, and the certificates of those who may sign a peer's."""

    pair: Path
    ca: Path


def peers_name(release: Release) -> str:
    return f"{release.name}_peers"


def authority(release: str) -> str:
    return f"{release}.release.serin"


def peer_listener(
    *, address: str, port: int, routes: Path, secrets: PeerSecrets | None, max_request_bytes: int
) -> Document:
    """Returns the listener for other gateways. With `secrets` it accepts only clients with a certificate."""
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": PEERS,
        "codec_type": "HTTP2",
        "server_name": "serin",
        # The first gateway has made the id, and releases record requests under it.
        "generate_request_id": False,
        "skip_xff_append": True,
        "max_request_headers_kb": _HEADERS_KB,
        "stream_idle_timeout": f"{STREAM_IDLE_S:g}s",
        "common_http_protocol_options": {"idle_timeout": "900s"},
        "http2_protocol_options": {"max_concurrent_streams": 1024},
        "rds": {"route_config_name": PEERS, "config_source": followed(routes)},
        "http_filters": [
            {"name": "buffer", "typed_config": {"@type": BUFFER, "max_request_bytes": max_request_bytes}},
            {"name": "router", "typed_config": {"@type": ROUTER, "suppress_envoy_headers": True}},
        ],
    }
    chain: Document = {"filters": [{"name": "http", "typed_config": manager}]}
    if secrets:
        context = {
            "@type": DOWNSTREAM_TLS,
            "common_tls_context": _tls_context(secrets),
            "require_client_certificate": True,
        }
        chain["transport_socket"] = {"name": "tls", "typed_config": context}
    return {
        "name": PEERS,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "filter_chains": [chain],
    }


def peer_routes(clusters: Mapping[str, tuple[str, str]], request_s: Mapping[str, float]) -> Document:
    """Returns the route table of the peer listener.

    `clusters`: by name of a release on this host, those for HTTP and gRPC. `request_s`: how long its requests may take.
    A release that is not here is answered as unavailable, so that the other gateway asks another one.
    """
    hosts = [
        {
            "name": name,
            "domains": [authority(name)],
            "routes": [
                {"match": {"prefix": "/", "grpc": {}}, "route": _forward(grpc, request_s[name])},
                {"match": {"prefix": "/"}, "route": _forward(http, request_s[name])},
            ],
        }
        for name, (http, grpc) in sorted(clusters.items())
    ]
    answer = {"status": 503, "body": {"inline_string": _NOT_HERE}}
    nobody = {
        "name": "none",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "direct_response": answer}],
    }
    return {"name": PEERS, "virtual_hosts": [*hosts, nobody]}


def peers_cluster(release: Release, addresses: Sequence[str], secrets: PeerSecrets | None) -> Document:
    """Returns the peers that have a release, as one cluster for both protocols."""
    name = peers_name(release)
    places = [split_address(address) for address in sorted(addresses)]
    endpoints = [
        {
            "endpoint": {
                "address": {"socket_address": {"address": host, "port_value": port}},
                "hostname": authority(release.name),
            }
        }
        for host, port in places
    ]
    document: Document = {
        "name": name,
        **resolved([host for host, _ in places]),
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": endpoints}],
            # As long as one peer is left, nothing goes to the release that is next in the order.
            "policy": {"overprovisioning_factor": 100_000},
        },
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [{"priority": "DEFAULT", **_LIMITS}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": HTTP_OPTIONS,
                "common_http_protocol_options": {"idle_timeout": "60s"},
                "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": _PING}},
            }
        },
    }
    if len(places) > 1:  # a single one is asked in any case
        document["outlier_detection"] = _OUTLIERS
    if secrets:
        context = {"@type": UPSTREAM_TLS, "common_tls_context": _tls_context(secrets), "sni": PEERS}
        document["transport_socket"] = {"name": "tls", "typed_config": context}
    return document


def hosts_in_order(first: Collection[str], then: Collection[str], *, together: bool) -> list[str]:
    """Returns the clusters of two releases in the order in which they are tried.

    `together`: a peer answers for the first release before the other one does. Else the other release answers at once,
    as for a candidate that fails on every host.
    """
    mine, others = list(first), list(then)
    if together or not mine or not others:
        return [*mine, *others]
    return [mine[0], others[0], *mine[1:], *others[1:]]


_LIMITS = {
    "max_connections": 1024,
    "max_pending_requests": 1024,
    "max_requests": 1024,
    "max_retries": 1_000_000,
}

# A connection over which nothing comes back is closed, and its requests are sent to another host.
_PING = {"interval": "1s", "timeout": "2s"}

# A peer that cannot be reached is left out for some seconds. Its answers, also failures, do not count: the rollout
# judges whether a release fails.
_OUTLIERS = {
    "split_external_local_origin_errors": True,
    "consecutive_local_origin_failure": 3,
    "enforcing_consecutive_local_origin_failure": 100,
    "enforcing_consecutive_5xx": 0,
    "enforcing_consecutive_gateway_failure": 0,
    "enforcing_success_rate": 0,
    "enforcing_local_origin_success_rate": 0,
    "interval": "1s",
    "base_ejection_time": "5s",
    "max_ejection_time": "30s",
    "max_ejection_percent": 99,  # never all of them
}


def _tls_context(secrets: PeerSecrets) -> Document:
    return {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": ["h2"],
        "tls_certificate_sds_secret_configs": [{"name": PAIR_NAME, "sds_config": followed(secrets.pair)}],
        "validation_context_sds_secret_config": {"name": CA_NAME, "sds_config": followed(secrets.ca)},
    }


def _forward(cluster: str, request_s: float) -> Document:
    idle_s = max(STREAM_IDLE_S, request_s + 1)
    return {"cluster": cluster, "timeout": f"{request_s:.3f}s", "idle_timeout": f"{idle_s:.3f}s"}


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolved(hosts: Sequence[str]) -> dict[str, Any]:
    """Returns how the hosts of a cluster are resolved: host names are looked up repeatedly.

    If one has both kinds of address, Envoy would use IPv6 only, even if nothing listens there. By default it would open
    no port before every name is resolved, so that a slow name server kept a restarted gateway from all of its models.
    """
    try:
        for host in hosts:
            ip_address(host)
    except ValueError:
        return {"type": "STRICT_DNS", "dns_lookup_family": "V4_PREFERRED", "wait_for_warm_on_init": False}
    return {"type": "STATIC"}
