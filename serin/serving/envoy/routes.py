"""Envoy's routes (RDS): which request goes to which release. Pure.

Default deny: a path or call that no route below names is answered with 404 and never reaches Triton. Paths are matched
whole, after Envoy has normalised them. The log's fields `arm` and `release` travel as request headers that only the
chosen branch of a route sets; a request without them (metadata, a refused path) is not logged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from serin.errors import GatewayRejected
from serin.serving.envoy.api_types import (
    DRAIN_NAME,
    FILTER_PER_ROUTE,
    PREVIOUS_HOSTS,
    PREVIOUS_PRIORITIES,
    REQUEST_FILTER,
    SERVICE,
    STREAM_IDLE_S,
    Document,
    extension,
    set_header,
)
from serin.serving.envoy.clusters import (
    PROTOCOLS,
    TOTAL_WEIGHT,
    Protocol,
    aggregate_name,
    cluster_name,
    every_host_name,
    weight,
)
from serin.serving.envoy.fixed_routes import (
    WINDOWS_CLUSTER,
    events_route,
    refusal,
    refusals,
    server_routes,
    too_large,
    unreachable,
)
from serin.serving.envoy.rates import MODELS_NAME
from serin.spec.rate import Rate, read_rate
from serin.store.artifacts import Endpoint, ModelRoute, Release

if TYPE_CHECKING:
    from serin.spec.objectives import ObjectivesSpec
    from serin.spec.serving import ServingSpec

Call = Literal["infer", "ready", "metadata"]

ROUTES_NAME = "models"

_CALLS: tuple[Call, ...] = ("infer", "ready", "metadata")
_NO_NUMBER = "this server is somebody else's and counts its versions otherwise; ask it by number over HTTP"

# No answer came: nobody listens, the connection broke, or the server says that it is not there.
_UNANSWERED = "reset,connect-failure,refused-stream,unavailable,retriable-status-codes"
_UNAVAILABLE = [503]
_RETRIES_ON_PEERS = 3  # this host and the peers, of two releases
# An answer came, and it is a failure.
_FAILED, _FAILED_GRPC = "5xx", "internal,resource-exhausted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a request may take, and when another release is tried as well, if there is one with traffic.

    A single release has the whole time. Of two, the first answer counts: a candidate that hangs costs a client
    `ask_another_s` and not the request, and a slow answer that comes in time is not lost. `max_text_bytes`: a longer
    string is refused at the gateway; None: unknown. `rate_limit` and `rate_burst`: of the model, at one gateway.
    `max_body_bytes`: of a request once its nulls are written out; None: they are not. `shares`: of the requests that
    are recorded, by the release that answers. `windows`: how columns over past events are added to requests
    (formats/windows.py); None: there are none.
    """

    request_s: float = 5.0
    promised_s: float | None = None
    max_text_bytes: int | None = None
    rate_limit: str | None = None
    rate_burst: int | None = None
    max_body_bytes: int | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    windows: Mapping[str, Any] | None = None

    @property
    def rate(self) -> Rate | None:
        return read_rate(self.rate_limit, self.rate_burst) if self.rate_limit else None

    @property
    def ask_another_s(self) -> float:
        """Returns a time far above the promised one, so that no slow moment looks like a hang; at most half of the
        time."""
        half_s = self.request_s / 2
        return half_s if self.promised_s is None else min(max(20 * self.promised_s, 1.0), half_s)

    @classmethod
    def from_spec(cls, serving: ServingSpec, objectives: ObjectivesSpec) -> Timeouts:
        return cls(
            request_s=float(serving.request_timeout),
            promised_s=objectives.latency_ms / 1000,
            max_text_bytes=serving.max_string,
            rate_limit=serving.rate_limit,
            rate_burst=serving.rate_burst,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """Where a gateway finds releases: `endpoints` of those it calls itself, `peers` by release, through which it
    reaches those on other hosts. `leaving`: releases that answer no new requests."""

    endpoints: Mapping[str, Endpoint]
    peers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    leaving: Collection[str] = ()

    @property
    def names(self) -> list[str]:
        return sorted({*self.endpoints, *self.peers} - {*self.leaving})

    def elsewhere(self, release: Release) -> bool:
        return release.name in self.endpoints and self.endpoints[release.name].elsewhere

    def on_peers(self, *releases: Release | None) -> bool:
        return any(release is not None and release.name in self.peers for release in releases)

    def cluster(self, release: Release, protocol: Protocol) -> str:
        name = every_host_name if self.on_peers(release) else cluster_name
        return name(release, protocol)


def route_configuration(
    routes: Sequence[ModelRoute],
    places: Reachable,
    timeouts: Mapping[str, Timeouts],
    max_request_bytes: int,
    *,
    unready: str = "",
    missing: Collection[str] = (),
) -> Document:
    """Returns the whole route table. Impossible routes are refused here, before Envoy sees them.

    `unready`: why the gateway is not ready. `missing`: models that it should serve and cannot reach.
    """
    _check(routes, places.names)
    found: list[Document] = []
    for route in routes:
        limits = replace(timeouts.get(route.model, Timeouts()), max_body_bytes=max_request_bytes)
        versions = _one_of_each(route, map(Release.parse, places.names))
        for protocol in PROTOCOLS:
            for release in versions:
                found += _pinned(route, release, protocol, limits, places)
            if route.stable:
                found += _weighted(route, route.stable, protocol, limits, places)
        if limits.windows is not None:
            found.append(events_route(route.model))
    for model in missing:
        found += unreachable(model)
    host: Document = {
        "name": "all",
        "domains": ["*"],
        "routes": [*too_large(max_request_bytes), *found, *server_routes(unready), *refusals(unready)],
        "request_body_buffer_limit": max_request_bytes,  # for a second try
        # Triton 2.51 may end when a deadline passes while it answers. Clients keep to theirs by themselves.
        "request_headers_to_remove": ["grpc-timeout"],
        "typed_per_filter_config": _without(timeouts),
    }
    return {"name": ROUTES_NAME, "virtual_hosts": [host], "ignore_port_in_host_matching": True}


def _one_of_each(route: ModelRoute, running: Iterable[Release]) -> list[Release]:
    """The releases that answer calls with a version's number: of several editions of its lookups the stable one until
    the candidate has all traffic, else the newest."""
    first = route.candidate if route.candidate_percent == 100 else route.stable
    found: dict[int, Release] = {}
    for release in sorted(running):
        own = release.model == route.model and not release.baseline
        if own and (first is None or found.get(release.version) != first):
            found[release.version] = release
    return [found[version] for version in sorted(found)]


def _without(timeouts: Mapping[str, Timeouts]) -> Document:
    """Leaves out the filters that have nothing to do on most routes: each takes time also when it does nothing. Routes
    that need one enable it."""
    names = ["bridge", DRAIN_NAME]
    if not any(limits.rate for limits in timeouts.values()):
        names.append(MODELS_NAME)
    if all(limits.windows is None for limits in timeouts.values()):
        names.append(WINDOWS_CLUSTER)
    return {name: {"@type": FILTER_PER_ROUTE, "disabled": True} for name in names}


def _check(routes: Sequence[ModelRoute], running: Collection[str]) -> None:
    for route in routes:
        both = route.candidate_percent + route.baseline_percent
        problems = [
            f"{percent} is not a percentage"
            for percent in (route.candidate_percent, route.baseline_percent, both)
            if not 0 <= percent <= 100
        ]
        if (route.candidate or route.baseline) and not route.stable:
            problems.append("a candidate needs a stable release to fall back to")
        problems += [
            f"{release.name} is not one of its running releases"
            for release in route.releases
            if release.model != route.model or release.name not in running
        ]
        if problems:
            raise GatewayRejected(what=f"the route of {route.model!r}", reason=problems[0])


def _weighted(
    route: ModelRoute, stable: Release, protocol: Protocol, limits: Timeouts, places: Reachable
) -> list[Document]:
    """Routes inference by weight; readiness and metadata follow the stable release.

    Another release answers for the stable one only where that gives no answer: its answer, also a failure, is final.
    """
    refuge = _refuge(route)
    # Adds retry conditions: a route has one policy, and Envoy adds what these headers say.
    also = {"x-envoy-retry-on": _FAILED, "x-envoy-retry-grpc-on": _FAILED_GRPC} if refuge else {}
    first = aggregate_name(stable, refuge, protocol) if refuge else places.cluster(stable, protocol)
    others = [
        _branch(aggregate_name(release, stable, protocol), weight(percent), arm, release, also)
        for arm, release, percent in (
            ("baseline", route.baseline, route.baseline_percent),
            ("candidate", route.candidate, route.candidate_percent),
        )
        if release and percent
    ]
    rest = TOTAL_WEIGHT - sum(branch["weight"] for branch in others)
    branches = [_branch(first, rest, "stable", stable)] if rest else []
    branches += others
    on_peers = places.on_peers(stable, refuge)
    policy = _limits(limits, refuge=bool(refuge), on_peers=on_peers)
    policy |= _by_its_own_name(on_peers or places.elsewhere(stable))
    action = {"weighted_clusters": {"clusters": branches}, **policy}
    asking = {"cluster": first, **policy}
    foreign = any(places.elsewhere(release) for release in route.releases)
    infer = {"match": _match("infer", protocol, route.model), "route": action}
    return [
        _infer_route(route, limits, infer, route.releases, foreign=foreign),
        {"match": _match("ready", protocol, route.model), "route": asking},
        {"match": _match("metadata", protocol, route.model), "route": asking},
    ]


def _refuge(route: ModelRoute) -> Release | None:
    """Returns the release that answers when the stable one does not: one with traffic, preferably of the same
    version."""
    shares = ((route.baseline, route.baseline_percent), (route.candidate, route.candidate_percent))
    return next((release for release, percent in shares if release and percent), None)


def _pinned(
    route: ModelRoute, release: Release, protocol: Protocol, limits: Timeouts, places: Reachable
) -> list[Document]:
    """A call that names a version goes to that release, outside the split. A server that somebody else runs does not
    know our numbers: it is asked without."""
    elsewhere, on_peers = places.elsewhere(release), places.on_peers(release)
    matches = {call: _match(call, protocol, route.model, release.version) for call in _CALLS}
    if elsewhere and protocol == "grpc":  # the number is in the message, which nothing rewrites
        return [refusal(match, 12, _NO_NUMBER, body="read") for match in matches.values()]
    policy = _limits(limits, on_peers=on_peers) | _by_its_own_name(elsewhere or on_peers)
    action = {"cluster": places.cluster(release, protocol), **policy}
    found: list[Document] = []
    for call, match in matches.items():
        plain = {"prefix_rewrite": _match(call, protocol, route.model)["path"]} if elsewhere else {}
        found.append({"match": match, "route": {**action, **plain}})
    found[0]["request_headers_to_add"] = _log_headers("pinned", release)
    return [_infer_route(route, limits, found[0], [release], foreign=elsewhere), *found[1:]]


def _by_its_own_name(elsewhere: bool) -> Document:
    """Names a server by its own host name: an external one may be one of several behind one address, and a peer finds
    the release by it."""
    return {"auto_host_rewrite": True} if elsewhere else {}


def _infer_route(
    route: ModelRoute,
    limits: Timeouts,
    document: Document,
    releases: Collection[Release],
    *,
    foreign: bool,
) -> Document:
    """`releases`: those that may answer. `foreign`: a server of somebody else may be asked, which gets JSON as the
    client wrote it."""
    known: Document = {"serin": {"model": route.model, "epoch": route.epoch}}
    if limits.rate is not None:
        known["serin"]["wait"] = str(limits.rate.wait_s)  # for retry-after
    bounds: Document = {
        "max_text_bytes": limits.max_text_bytes,
        "max_written_bytes": None if foreign else limits.max_body_bytes,
    }
    shares = {f"share {each.name}": limits.shares.get(each.name, 0.0) for each in releases}
    if any(shares.values()):
        bounds |= {**shares, "share": max(shares.values())}
    if limits.windows is not None:
        bounds[WINDOWS_CLUSTER] = 1
    if any(bounds.values()):  # by the name of the filter that reads them
        known[REQUEST_FILTER] = {key: value for key, value in bounds.items() if value is not None}
    return {"name": f"{route.model}/{route.epoch}", "metadata": {"filter_metadata": known}, **document}


def _branch(
    cluster: str, weight: int, arm: str, release: Release, also: Mapping[str, str] | None = None
) -> Document:
    return {"name": cluster, "weight": weight, "request_headers_to_add": _log_headers(arm, release, also)}


def _log_headers(arm: str, release: Release, also: Mapping[str, str] | None = None) -> list[Document]:
    pairs = {"x-serin-arm": arm, "x-serin-release": release.name, **(also or {})}
    return [set_header(key, value) for key, value in pairs.items()]


def _match(call: Call, protocol: Protocol, model: str, version: int | None = None) -> Document:
    if protocol == "http":
        place = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
        path = place if call == "metadata" else f"{place}/{call}"
        return {"path": path, "headers": [_is(":method", "POST" if call == "infer" else "GET")]}
    method = {"infer": "ModelInfer", "ready": "ModelReady", "metadata": "ModelMetadata"}[call]
    unpinned = {"name": "x-serin-version", "present_match": False}
    pinned = _is("x-serin-version", str(version)) if version else unpinned
    return {"path": f"{SERVICE}/{method}", "grpc": {}, "headers": [_is("x-serin-model", model), pinned]}


def _is(header: str, value: str) -> Document:
    return {"name": header, "string_match": {"exact": value}}


def _limits(limits: Timeouts, *, refuge: bool = False, on_peers: bool = False) -> Document:
    """Sends a retry to a priority that was not tried: from the candidate to the stable release, and back.

    `on_peers`: other hosts have the release, so there are more places to try, and a host may be gone.
    """
    again: Document = {
        "retry_on": ",".join([_UNANSWERED] if refuge else [_UNANSWERED, _FAILED, _FAILED_GRPC]),
        "retriable_status_codes": _UNAVAILABLE,
        "num_retries": 1,
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.010s"},
    }
    policy: Document = {
        "timeout": _seconds(limits.request_s),
        "idle_timeout": _seconds(max(STREAM_IDLE_S, limits.request_s + 1)),
        "retry_policy": again,
    }
    if on_peers:
        again["num_retries"] = _RETRIES_ON_PEERS
        again["retry_host_predicate"] = [extension("previous_hosts", PREVIOUS_HOSTS)]
        again["host_selection_retry_max_attempts"] = 5
    if refuge or on_peers:  # the cluster has priorities
        again["retry_priority"] = extension("previous_priorities", PREVIOUS_PRIORITIES, update_frequency=1)
        again["per_try_timeout"] = _seconds(limits.ask_another_s)
        policy["hedge_policy"] = {"hedge_on_per_try_timeout": True}  # the first try continues
    return policy


def _seconds(value: float) -> str:
    return f"{value:.3f}s"
