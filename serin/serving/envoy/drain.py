"""Refused requests whose body is read to its end and dropped before they are answered. Pure.

An answer that is sent while the body still arrives makes Envoy reset an HTTP/2 stream and close an HTTP/1.1 connection,
and some clients report that instead of the answer. The filter is a script that runs on the routes that ask for it.
"""

from __future__ import annotations

from typing import Any

from serin.serving.envoy.api_types import LUA, LUA_PER_ROUTE, SOURCES

Document = dict[str, Any]

_NAME = "drain"


def longest_read(max_request_bytes: int) -> int:
    """The length of a body that is still read when a request with a larger one than allowed is refused."""
    return 2 * max_request_bytes


def drain_script() -> str:
    """Defines the function drain."""
    return (SOURCES / "drain.lua").read_text()


def drain_filter() -> Document:
    """Its place in the chain, before the buffer that waits for the body. It runs on the routes that ask for it."""
    lines = (
        drain_script(),
        "function envoy_on_request(handle)",
        '  handle:headers():remove("inference-header-content-length")  -- it has no meaning without the body',
        "  drain(handle)",
        "end",
    )
    source = {"inline_string": "\n".join(lines)}
    return {"name": _NAME, "typed_config": {"@type": LUA, "source_codes": {_NAME: source}}}


def drained() -> Document:
    """Settings of a route that refuses: the body is dropped, and the buffer waits for its end."""
    return {_NAME: {"@type": LUA_PER_ROUTE, "name": _NAME}}
