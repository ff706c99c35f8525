"""The routes that are the same whatever is served (RDS): the gateway's own health, and every refusal. Pure."""

from __future__ import annotations

from typing import Any

from serin.serving.envoy.api_types import BUFFER_PER_ROUTE, JSON_HEADER, REVERSE_BRIDGE_PER_ROUTE, SERVICE

Document = dict[str, Any]

HEALTH_CLUSTER = "health"


def server_routes() -> list[Document]:
    """Health of the server is the gateway's own."""
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


def refusals() -> list[Document]:
    stream = "streams are not served here; call ModelInfer"
    model = "no such model or version is served here"
    path = "this gateway answers inference, readiness and metadata of models, and nothing else"
    return [
        refusal({"path": f"{SERVICE}/ModelStreamInfer"}, 12, stream, buffered=False),
        # A call is here first and comes back when the message has been looked at: so the body must be waited for.
        refusal(
            {"safe_regex": {"regex": f"{SERVICE}/Model(Infer|Ready|Metadata)"}, "grpc": {}},
            5,
            model,
            buffered=True,
        ),
        refusal({"prefix": "/", "grpc": {}}, 12, path, buffered=False),
        refusal(
            {"safe_regex": {"regex": "/v2/models/[^/]+(/versions/[^/]+)?(/infer|/ready)?"}},
            None,
            model,
            buffered=False,
        ),
        refusal({"prefix": "/"}, None, path, buffered=False),
    ]


def refusal(match: Document, grpc_status: int | None, text: str, *, buffered: bool) -> Document:
    document: Document = {"match": match, "direct_response": {"status": 404, "body": {"inline_string": text}}}
    if not buffered:
        document["typed_per_filter_config"] = {"buffer": {"@type": BUFFER_PER_ROUTE, "disabled": True}}
    if grpc_status is not None:
        header = {"key": "grpc-status", "value": str(grpc_status)}
        document["response_headers_to_add"] = [
            {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ]
    return document
