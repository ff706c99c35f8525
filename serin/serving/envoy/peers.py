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
    CONNECTION_BUFFER_BYTES,
    DOWNSTREAM_TLS,
    HTTP_OPTIONS,
    STREAM_IDLE_S,
    UPSTREAM_TLS,
    Document,
    cluster,
    extension,
    followed,
    listener,
    router,
    socket_address,
)
from serin.serving.envoy.guard import tls_context
from serin.store.artifacts import Release

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
            extension("buffer", BUFFER, max_request_bytes=max_request_bytes),
            router(suppress_envoy_headers=True),
        ],
    }
    return listener(
        PEERS,
        socket_address(address, port),
        manager,
        _tls(DOWNSTREAM_TLS, secrets, require_client_certificate=True) if secrets else None,
        enable_reuse_port=False,
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
    )


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
    places = [split_address(address) for address in sorted(addresses)]
    hostname = authority(release.name)
    document = cluster(
        peers_name(release),
        *({"address": socket_address(host, port), "hostname": hostname} for host, port in places),
        release=release.name,
        **resolved([host for host, _ in places]),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        circuit_breakers=circuit(max_retries=1_000_000),
        typed_extension_protocol_options=http_options(
            {"http2_protocol_options": {"connection_keepalive": _PING}}
        ),
    )
    # As long as one peer is left, nothing goes to the release that is next in the order.
    document["load_assignment"]["policy"] = {"overprovisioning_factor": 100_000}
    if len(places) > 1:  # a single one is asked in any case
        document["outlier_detection"] = _OUTLIERS
    if secrets:
        document["transport_socket"] = _tls(UPSTREAM_TLS, secrets, sni=PEERS)
    return document


def circuit(**retries: Any) -> Document:
    """Returns the circuit breaker: requests beyond the limit are refused with 503, because Triton's queue is
    unbounded."""
    limits = {"max_connections": 1024, "max_pending_requests": 1024, "max_requests": 1024, **retries}
    return {"thresholds": [{"priority": "DEFAULT", **limits}]}


def http_options(wire: Document, **settings: Any) -> Document:
    """Returns how a cluster speaks HTTP; `wire` chooses the version."""
    options = {
        "@type": HTTP_OPTIONS,
        "common_http_protocol_options": {"idle_timeout": "60s"},
        "explicit_http_config": wire,
        **settings,
    }
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}


def hosts_in_order(first: Collection[str], then: Collection[str], *, together: bool) -> list[str]:
    """Returns the clusters of two releases in the order in which they are tried.

    `together`: a peer answers for the first release before the other one does. Else the other release answers at once,
    as for a candidate that fails on every host.
    """
    mine, others = list(first), list(then)
    if together or not mine or not others:
        return [*mine, *others]
    return [mine[0], others[0], *mine[1:], *others[1:]]


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


def _tls(kind: str, secrets: PeerSecrets, **settings: Any) -> Document:
    trusted = {"name": CA_NAME, "sds_config": followed(secrets.ca)}
    context = tls_context(PAIR_NAME, secrets.pair, "h2")
    context["validation_context_sds_secret_config"] = trusted
    return extension("tls", kind, common_tls_context=context, **settings)


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
