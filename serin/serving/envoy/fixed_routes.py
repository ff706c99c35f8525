"""The routes that do not depend on what is served (RDS): the gateway's own health, and every refusal. Pure."""

from __future__ import annotations

from typing import Any, Literal

from serin.serving.envoy.api_types import BUFFER_PER_ROUTE, JSON_HEADER, REVERSE_BRIDGE_PER_ROUTE, SERVICE
from serin.serving.envoy.drain import drained, longest_read

Document = dict[str, Any]
# What happens to the body of a refused request. `read`: it is held, because its message may select another route;
# `ignored`: the answer does not wait for it.
Body = Literal["drained", "read", "ignored"]

HEALTH_CLUSTER = "health"


def server_routes() -> list[Document]:
    """Returns the routes of the server's health, which is the gateway's own."""
    live = {"match": {"safe_regex": {"regex": "/v2/health/(live|ready)"}}, "direct_response": {"status": 200}}
    body = '{"name":"serin","version":"2","extensions":["binary_tensor_data"]}'
    about = {
        "match": {"path": "/v2"},
        "direct_response": {"status": 200, "body": {"inline_string": body}},
        "response_headers_to_add": [JSON_HEADER],
    }
    # No match on `grpc` here: the bridge changes the content type, and the route is chosen again after that.
    calls = {
        "match": {"safe_regex": {"regex": f"{SERVICE}/Server(Live|Ready)"}},
        "route": {"cluster": HEALTH_CLUSTER},
        "typed_per_filter_config": {"bridge": {"@type": REVERSE_BRIDGE_PER_ROUTE, "disabled": False}},
    }
    return [live, about, calls]


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


def refusals() -> list[Document]:
    stream = "streams are not served here; call ModelInfer"
    model = "no such model or version is served here"
    path = "this gateway answers inference, readiness and metadata of models, and nothing else"
    calls = f"{SERVICE}/Model(Infer|Ready|Metadata)"
    models = "/v2/models/[^/]+(/versions/[^/]+)?(/infer|/ready)?"
    return [
        # The client of a stream waits for an answer before it ends its side.
        refusal({"path": f"{SERVICE}/ModelStreamInfer"}, 12, stream, body="ignored"),
        # A call is here first and comes back when the message has been looked at.
        refusal({"safe_regex": {"regex": calls}, "grpc": {}}, 5, model, body="read"),
        refusal({"prefix": "/", "grpc": {}}, 12, path, body="ignored"),
        refusal({"safe_regex": {"regex": models}}, None, model, body="drained"),
        refusal({"prefix": "/"}, None, path, body="drained"),
    ]


def refusal(
    match: Document, grpc_status: int | None, text: str, *, body: Body, status: int = 404
) -> Document:
    answer = {"status": status, "body": {"inline_string": text}}
    document: Document = {"match": match, "direct_response": answer}
    if body == "drained":
        document["typed_per_filter_config"] = drained()
    elif body == "ignored":
        document["typed_per_filter_config"] = {"buffer": {"@type": BUFFER_PER_ROUTE, "disabled": True}}
    if grpc_status is not None:
        header = {"key": "grpc-status", "value": str(grpc_status)}
        document["response_headers_to_add"] = [
            {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ]
    return document
