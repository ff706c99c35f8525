"""The form of the gateway's own answers: the status, the JSON text, and the advice to retry later. Pure."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def local_replies() -> Document:
    """Returns the connection manager's `local_reply_config`; the first mapper that matches is used."""
    return {"mappers": [_not_implemented(), _overloaded(), _come_back(), *_too_many(), _json_errors()]}


def _not_implemented() -> Document:
    """Maps a transfer encoding that Envoy does not know to a client error."""
    status = {
        "comparison": {"op": "EQ", "value": {"default_value": 501, "runtime_key": "serin.not_implemented"}}
    }
    text = {
        "json_format": {"error": "this transfer encoding is not known here"},
        "content_type": "application/json",
    }
    return {"filter": {"status_code_filter": status}, "status_code": 400, "body_format_override": text}


def _overloaded() -> Document:
    """Maps the 500 that Envoy gives for a request it drops for lack of memory."""
    status = {"comparison": {"op": "EQ", "value": {"default_value": 500, "runtime_key": "serin.overloaded"}}}
    text = {
        "json_format": {"error": "the gateway has no room for this request now; send it again"},
        "content_type": "application/json",
    }
    again = {**_come_back(), "status_code": 503, "body_format_override": text}
    return {**again, "filter": {"status_code_filter": status}}


def _too_many() -> list[Document]:
    """Says in words that a rate limit was reached; the filter that refuses adds retry-after. The first is for HTTP."""
    status = {"comparison": {"op": "EQ", "value": {"default_value": 429, "runtime_key": "serin.too_many"}}}
    text = {"inline_string": "too many requests for this caller or model; send fewer, or try again later"}
    plain = _json_errors(429)
    both = {"and_filter": {"filters": [{"status_code_filter": status}, plain["filter"]]}}
    return [{**plain, "filter": both, "body": text}, {"filter": {"status_code_filter": status}, "body": text}]


def _json_errors(first_status: int = 400) -> Document:
    """Formats Envoy's own answers like Triton's errors. In gRPC the text is the plain status message."""
    key = f"serin.json_errors_from_{first_status}"
    status = {"comparison": {"op": "GE", "value": {"default_value": first_status, "runtime_key": key}}}
    grpc = {
        "name": "content-type",
        "string_match": {"prefix": "application/grpc"},
        "invert_match": True,
        "treat_missing_header_as_empty": True,
    }
    return {
        "filter": {"and_filter": {"filters": [{"status_code_filter": status}, {"header_filter": {"header": grpc}}]}},
        "body_format_override": {
            "json_format": {"error": "%LOCAL_REPLY_BODY%"}, "content_type": "application/json",
        },
    }  # fmt: skip


def _come_back() -> Document:
    """Adds retry-after for overload or a release that is restarting. gRPC has its own status for this."""
    header = {
        "header": {"key": "retry-after", "value": "1"},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }
    return {**_json_errors(503), "headers_to_add": [header]}
