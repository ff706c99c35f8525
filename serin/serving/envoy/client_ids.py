"""Keeps the id that a client gives its request (x-request-id) beside the one that the gateway makes. Pure.

Envoy replaces x-request-id before the first filter runs, so the client's own is copied to another header before that.
Logs and recorded requests have both.
"""

from __future__ import annotations

from typing import Any

from serin.formats.serving.request import CLIENT_ID_BYTES
from serin.serving.envoy.api_types import (
    EARLY_HEADER_MUTATION,
    HEADER_MUTATION,
    MATCHED,
    REQUEST_HEADER,
    SKIP,
)

Document = dict[str, Any]

CLIENT_ID_HEADER = "x-serin-client-id"


def keep_client_id() -> Document:
    """Returns the step that copies the id. It first removes every header of Serin's and Envoy's that a client sets."""
    kept = {"key": CLIENT_ID_HEADER, "value": f"%REQ(X-REQUEST-ID):{CLIENT_ID_BYTES}%"}
    mutations = [
        {"remove_on_match": {"key_matcher": {"prefix": "x-serin-"}}},
        {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}},
        {"append": {"header": kept, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
    ]
    config = {"@type": EARLY_HEADER_MUTATION, "mutations": mutations}
    return {"name": "client_id", "typed_config": config}


def odd_id_filter() -> Document:
    """Returns the filter that removes a client's id unless it is printable ASCII: Triton's Python backend fails
    requests with other bytes in a header."""
    header = {"@type": REQUEST_HEADER, "header_name": CLIENT_ID_HEADER}
    plain = {
        "input": {"name": "id", "typed_config": header},
        "value_match": {"safe_regex": {"google_re2": {}, "regex": "[ -~]+"}},
    }
    skip = {"action": {"name": "skip", "typed_config": {"@type": SKIP}}}
    matchers = [{"predicate": {"single_predicate": plain}, "on_match": skip}]
    removal = {"mutations": {"request_mutations": [{"remove": CLIENT_ID_HEADER}]}}
    config = {
        "@type": MATCHED,
        "extension_config": {"name": "remove", "typed_config": {"@type": HEADER_MUTATION, **removal}},
        "xds_matcher": {"matcher_list": {"matchers": matchers}},
    }
    return {"name": "odd_id", "typed_config": config}
