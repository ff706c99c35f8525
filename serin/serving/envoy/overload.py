"""Configures what Envoy does before it runs out of memory or connections (its overload manager). Pure.

A request body is held whole until it is forwarded, 32 MB at most, and a client can send many at once: without a limit
they end in the kernel's out-of-memory killer. Near the limit the largest requests are dropped first, then every new one
is refused with 503; answers stay small.
"""

from __future__ import annotations

from serin.serving.envoy.api_types import (
    CONNECTION_BUFFER_BYTES,
    FIXED_HEAP,
    MAX_CONNECTIONS,
    SCALED_TIMERS,
    Document,
    extension,
)

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_LOOK_S = 0.1  # what comes in the meantime is on top of the limit: some 100 MB of a fast network
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 8 << 30
_MOST_CONNECTIONS = 20_000
_TRACKED = 20  # streams that hold at least 2**20 bytes can be dropped

_STALLED = {
    "@type": SCALED_TIMERS,
    "timer_scale_factors": [{"timer": "HTTP_DOWNSTREAM_STREAM_IDLE", "min_timeout": "5s"}],
}


def default_heap_bytes(memory_bytes: int) -> int:
    """Returns the heap limit for a machine or container with `memory_bytes`: the releases need the rest."""
    return min(max(memory_bytes // 4, _LEAST_BYTES), _MOST_BYTES)


def default_connections(heap_bytes: int) -> int:
    """Returns as many connections as can be slow at once."""
    return min(_MOST_CONNECTIONS, heap_bytes // (2 * CONNECTION_BUFFER_BYTES))


def overload_manager(*, max_heap_bytes: int, max_connections: int) -> Document:
    """Returns the overload manager. Connections beyond `max_connections` are closed as soon as they arrive."""
    return {
        "refresh_interval": f"{_LOOK_S:g}s",
        "resource_monitors": [
            extension(_HEAP, FIXED_HEAP, max_heap_size_bytes=max_heap_bytes),
            extension(_CONNECTIONS, MAX_CONNECTIONS, max_active_downstream_connections=max_connections),
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": _TRACKED},
        "actions": [
            _action("shrink_heap", {"threshold": {"value": 0.5}}),
            _action("reset_high_memory_stream", {"scaled": _between(0.80, 0.95)}),
            _action("disable_http_keepalive", {"threshold": {"value": 0.85}}),
            _action("stop_accepting_requests", {"threshold": {"value": 0.90}}),
            _action("reduce_timeouts", {"scaled": _between(0.50, 0.80)}) | {"typed_config": _STALLED},
        ],
        "loadshed_points": [
            _shed("http1_server_abort_dispatch", _between(0.80, 0.95)),
            _shed("http2_server_go_away_and_close_on_dispatch", _between(0.95, 1.0)),
        ],
    }


def _shed(point: str, scaled: Document) -> Document:
    return {"name": f"envoy.load_shed_points.{point}", "triggers": [{"name": _HEAP, "scaled": scaled}]}


def _action(name: str, when: Document) -> Document:
    return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": _HEAP, **when}]}


def _between(first: float, all_of_it: float) -> Document:
    return {"scaling_threshold": first, "saturation_threshold": all_of_it}
