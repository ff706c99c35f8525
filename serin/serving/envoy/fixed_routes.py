"""The routes that do not depend on what is served (RDS): the gateway's own health, and every refusal. Pure."""

from __future__ import annotations

import re
from typing import Final, Literal

from serin.serving.envoy.api_types import (
    BUFFER_PER_ROUTE,
    DRAIN_NAME,
    LUA_PER_ROUTE,
    REVERSE_BRIDGE_PER_ROUTE,
    SERVICE,
    Document,
    longest_read,
    set_header,
)

# What happens to the body of a refused request. `read`: it is held, because its message may select another route;
# `ignored`: the answer does not wait for it.
Body = Literal["drained", "read", "ignored"]

HEALTH_CLUSTER = "health"
WINDOWS_CLUSTER = "windows"  # computes windows over past events; the request filter asks it by this name
READY = "server-ready"  # the name of the routes about readiness
NOT_READY_PATH = "/not-ready"  # of the health listener
NO_ROUTES = "the routes of the models are not in force yet"

_UNAVAILABLE: Final = 14  # of gRPC
_CALLS = f"{SERVICE}/Model(Infer|Ready|Metadata)"
_REST = "(/versions/[^/]+)?(/infer|/ready)?"


def server_routes(unready: str = "") -> list[Document]:
    """Returns the routes of the server's health, which is the gateway's own. `unready`: why it is not ready."""
    live = {"match": {"path": "/v2/health/live"}, "direct_response": {"status": 200}}
    body = '{"name":"serin","version":"2","extensions":["binary_tensor_data"]}'
    about = {
        "match": {"path": "/v2"},
        "direct_response": {"status": 200, "body": {"inline_string": body}},
        "response_headers_to_add": [set_header("content-type", "application/json")],
    }
    return [*readiness(unready), live, about, _health_call("ServerLive")]


def readiness(unready: str) -> list[Document]:
    """Returns the routes by which a load balancer learns whether this gateway answers for its models."""
    answer: Document = {"status": 200}
    if unready:
        answer = {"status": 503, "body": {"inline_string": unready}}
    asked = {"name": READY, "match": {"path": "/v2/health/ready"}, "direct_response": answer}
    return [asked, {"name": READY, **_health_call("ServerReady", NOT_READY_PATH if unready else None)}]


def events_route(model: str) -> Document:
    """Returns the route by which events of a model are pushed (POST), and by which clients learn what an event has
    (GET). Keys are checked before, by the model in the path."""
    methods = {"safe_regex": {"regex": "GET|POST"}}
    match = {"path": f"/v2/models/{model}/events", "headers": [{"name": ":method", "string_match": methods}]}
    return {"match": match, "route": {"cluster": WINDOWS_CLUSTER, "timeout": "60s"}}


def _health_call(call: str, path: str | None = None) -> Document:
    # No match on `grpc` here: the bridge changes the content type, and the route is chosen again after that.
    return {
        "match": {"path": f"{SERVICE}/{call}"},
        "route": {"cluster": HEALTH_CLUSTER, **({"prefix_rewrite": path} if path else {})},
        "typed_per_filter_config": {"bridge": {"@type": REVERSE_BRIDGE_PER_ROUTE, "disabled": False}},
    }


def is_ready(table: Document) -> bool:
    """Returns whether a gateway with this route table says that it is ready."""
    routes = [entry for host in table["virtual_hosts"] for entry in host["routes"]]
    answers = [
        entry.get("direct_response", {}).get("status") for entry in routes if entry.get("name") == READY
    ]
    return 200 in answers


def not_ready(table: Document, why: str) -> Document:
    """Returns the route table of a gateway whose routes may be out of date."""
    hosts = [
        {**host, "routes": [*readiness(why), *(each for each in host["routes"] if each.get("name") != READY)]}
        for host in table["virtual_hosts"]
    ]
    return {**table, "virtual_hosts": hosts}


def too_large(max_request_bytes: int) -> list[Document]:
    """Refuses bodies whose declared length is above the limit. The buffer counts others as they arrive."""
    text, most = "Payload Too Large", longest_read(max_request_bytes)
    ranges: tuple[tuple[Body, int, int], ...] = (
        ("drained", max_request_bytes + 1, most + 1),
        ("ignored", most + 1, 2**63 - 1),
    )
    found = []
    for body, start, end in ranges:
        length = {"name": "content-length", "range_match": {"start": str(start), "end": str(end)}}
        found.append(refusal({"prefix": "/", "headers": [length]}, None, text, body=body, status=413))
    return found


def refusals(unready: str = "") -> list[Document]:
    """Refuses everything that no route names. `unready`: a model that is not known may be known soon."""
    stream = "streams are not served here; call ModelInfer"
    model = unready or "no such model or version is served here"
    status, grpc_status = (503, _UNAVAILABLE) if unready else (404, 5)
    path = "this gateway answers inference, readiness and metadata of models, and nothing else"
    return [
        # The client of a stream waits for an answer before it ends its side.
        refusal({"path": f"{SERVICE}/ModelStreamInfer"}, 12, stream, body="ignored"),
        # A call is here first and comes back when the message has been looked at.
        refusal(
            {"safe_regex": {"regex": _CALLS}, "grpc": {}}, grpc_status, model, body="read", status=status
        ),
        refusal({"prefix": "/", "grpc": {}}, 12, path, body="ignored"),
        refusal(
            {"safe_regex": {"regex": f"/v2/models/[^/]+{_REST}"}}, None, model, body="drained", status=status
        ),
        refusal({"prefix": "/"}, None, path, body="drained"),
    ]


def unreachable(model: str) -> list[Document]:
    """Refuses requests for a model that is served and has no release that this gateway can reach."""
    text = f"no release of {model} can be reached from this gateway now; try again later"
    named = {"name": "x-serin-model", "string_match": {"exact": model}}
    path = {"regex": f"/v2/models/{re.escape(model)}{_REST}"}
    return [
        refusal(
            {"safe_regex": {"regex": _CALLS}, "grpc": {}, "headers": [named]},
            _UNAVAILABLE,
            text,
            body="read",
            status=503,
        ),
        refusal({"safe_regex": path}, None, text, body="drained", status=503),
    ]


def refusal(
    match: Document, grpc_status: int | None, text: str, *, body: Body, status: int = 404
) -> Document:
    answer = {"status": status, "body": {"inline_string": text}}
    document: Document = {"match": match, "direct_response": answer}
    if body == "drained":  # it is dropped, and the buffer waits for its end
        document["typed_per_filter_config"] = {DRAIN_NAME: {"@type": LUA_PER_ROUTE, "name": DRAIN_NAME}}
    elif body == "ignored":
        document["typed_per_filter_config"] = {"buffer": {"@type": BUFFER_PER_ROUTE, "disabled": True}}
    if grpc_status is not None:
        document["response_headers_to_add"] = [set_header("grpc-status", str(grpc_status))]
    return document
