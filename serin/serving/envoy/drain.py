"""Reads the body of refused requests to its end and drops it before they are answered. Pure.

An answer that is sent while the body still arrives makes Envoy reset an HTTP/2 stream and close an HTTP/1.1 connection,
and some clients report that instead of the answer. The filter is a script that runs on the routes that enable it.
"""

from __future__ import annotations

from typing import Any

from serin.serving.envoy.api_types import LUA, LUA_PER_ROUTE, SOURCES

Document = dict[str, Any]

DRAIN_NAME = "drain"


def longest_read(max_request_bytes: int) -> int:
    """Returns the length up to which a body is still read when it is refused as too large."""
    return 8 * max_request_bytes


def drain_script() -> str:
    """Returns the script that defines the function drain."""
    return (SOURCES / "drain.lua").read_text()


def drain_filter() -> Document:
    """Returns the filter, placed before the buffer that waits for the body. It runs on the routes that enable it."""
    lines = (
        drain_script(),
        "function envoy_on_request(handle)",
        '  handle:headers():remove("inference-header-content-length")  -- it has no meaning without the body',
        "  drain(handle)",
        "end",
    )
    source = {"inline_string": "\n".join(lines)}
    return {"name": DRAIN_NAME, "typed_config": {"@type": LUA, "source_codes": {DRAIN_NAME: source}}}


def drained() -> Document:
    """Returns the settings of a route that refuses: the body is dropped, and the buffer waits for its end."""
    return {DRAIN_NAME: {"@type": LUA_PER_ROUTE, "name": DRAIN_NAME}}
