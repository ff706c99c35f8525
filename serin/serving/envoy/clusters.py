"""Envoy's clusters (CDS): the addresses of the running releases. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from serin.serving.envoy.api_types import (
    AGGREGATE,
    CONNECTION_BUFFER_BYTES,
    RESPONSE_HEADER,
    UPSTREAM_CODEC,
    Document,
    cluster,
    extension,
    header_matches,
    script_filter,
    socket_address,
)
from serin.serving.envoy.peers import (
    PeerSecrets,
    circuit,
    hosts_in_order,
    http_options,
    peers_cluster,
    peers_name,
    resolved,
    split_address,
)
from serin.store.artifacts import Endpoint, ModelRoute, Release

Protocol = Literal["http", "grpc"]

PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")

TOTAL_WEIGHT = 10_000  # steps of 0.01%

_FEW = {"budget_percent": {"value": 20}, "min_retry_concurrency": 8}


def cluster_name(release: Release, protocol: Protocol) -> str:
    return f"{release.name}_{protocol}"


def aggregate_name(first: Release, then: Release, protocol: Protocol) -> str:
    return f"{first.name}_{protocol}_then_{then.name}"


def every_host_name(release: Release, protocol: Protocol) -> str:
    return f"{release.name}_{protocol}_every_host"


def clusters(
    routes: Sequence[ModelRoute],
    endpoints: Mapping[str, Endpoint],
    peers: Mapping[str, Sequence[str]] | None = None,
    secrets: PeerSecrets | None = None,
) -> list[Document]:
    """Returns two clusters per running release, and those that fall back between the stable release and a candidate.

    A baseline has fallbacks like a candidate. These stay while the route names the candidate, also without weight:
    requests in flight at a release that hangs are retried through them. `peers`: by release, the addresses of other
    gateways whose hosts run it; `secrets`: for TLS to them.
    """
    peers = peers or {}
    found = []
    for name, endpoint in sorted(endpoints.items()):
        release = Release.parse(name)
        found += [_release_cluster(release, protocol, endpoint) for protocol in PROTOCOLS]
    for name, addresses in sorted(peers.items()):
        release = Release.parse(name)
        found.append(peers_cluster(release, addresses, secrets))
        for protocol in PROTOCOLS:
            order = _hosts(release, protocol, endpoints, peers)
            found.append(_aggregate(every_host_name(release, protocol), order, protocol))
    for route in routes:
        for other in (route.baseline, route.candidate):
            if route.stable and other:
                for protocol in PROTOCOLS:
                    mine, others = (
                        _hosts(release, protocol, endpoints, peers) for release in (route.stable, other)
                    )
                    name = aggregate_name(other, route.stable, protocol)
                    found.append(_aggregate(name, hosts_in_order(others, mine, together=False), protocol))
                    name = aggregate_name(route.stable, other, protocol)
                    found.append(_aggregate(name, hosts_in_order(mine, others, together=True), protocol))
    return found


def _hosts(
    release: Release,
    protocol: Protocol,
    endpoints: Mapping[str, Endpoint],
    peers: Mapping[str, Sequence[str]],
) -> list[str]:
    """Returns the clusters that hold a release, this host's first."""
    here = [cluster_name(release, protocol)] if release.name in endpoints else []
    return [*here, *([peers_name(release)] if release.name in peers else [])]


def weight(percent: float) -> int:
    return round(percent * TOTAL_WEIGHT / 100)


def _release_cluster(release: Release, protocol: Protocol, place: Endpoint) -> Document:
    host, port = split_address(place.grpc if protocol == "grpc" else place.http)
    return cluster(
        cluster_name(release, protocol),
        {"address": socket_address(host, port)},
        release=release.name,
        **resolved([host]),
        connect_timeout="5s" if place.elsewhere else "1s",  # on a way that may lose packets
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        # A stable release that fails must not get every request twice.
        circuit_breakers=circuit(retry_budget=_FEW),
        typed_extension_protocol_options=_protocol_options(protocol),
    )


def _aggregate(name: str, order: Sequence[str], protocol: Protocol) -> Document:
    """Returns clusters that are tried in this order."""
    return {
        "name": name,
        "connect_timeout": "1s",
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": extension("aggregate", AGGREGATE, clusters=list(order)),
        # Every request that meets a dead release is to be saved, however many there are.
        "circuit_breakers": circuit(max_retries=1_000_000),
        # The connection's options come from the inner cluster, the filters from this one.
        "typed_extension_protocol_options": _protocol_options(protocol),
    }


def _protocol_options(protocol: Protocol) -> Document:
    wire = "http2_protocol_options" if protocol == "grpc" else "http_protocol_options"
    if protocol == "grpc":
        return http_options({wire: {}})
    # The gateway hands on no message that a server of gRPC cannot read.
    return http_options({wire: {}}, http_filters=[_bad_request(), extension("codec", UPSTREAM_CODEC)])


def _bad_request() -> Document:
    """Returns the script for answers with status 500 only, so that good ones do not pay for it."""
    failed = header_matches(RESPONSE_HEADER, ":status", {"exact": "500"})
    return script_filter("bad_request", "bad_request.lua", unless={"not_matcher": failed})
