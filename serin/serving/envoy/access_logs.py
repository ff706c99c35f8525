"""The gateway's two logs. Pure.

`requests` has one line per inference that was sent to a release; rollouts take their evidence from it. `refusals` has
requests that the gateway refused itself, at most a few lines per second, so that a client that is refused a million
times does not fill the disk. Counters beside it count every refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serin.serving.envoy.api_types import FILE_LOG, LOG_BUCKET, LOG_RATE, STATS_LOG, followed

Document = dict[str, Any]

LOG_FIELDS = {
    "t": "%START_TIME(%s.%6f)%",
    "model": "%METADATA(ROUTE:serin:model)%",
    "epoch": "%METADATA(ROUTE:serin:epoch)%",
    "arm": "%REQ(X-SERIN-ARM)%",
    "release": "%REQ(X-SERIN-RELEASE)%",
    "code": "%RESPONSE_CODE%",
    "grpc": "%GRPC_STATUS_NUMBER%",
    "us": "%COMMON_DURATION(DS_RX_END:DS_TX_END:us)%",
    "up_us": "%COMMON_DURATION(US_TX_BEG:US_RX_END:us)%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "flags": "%RESPONSE_FLAGS%",
    "proto": "%PROTOCOL%",
    "id": "%REQ(X-REQUEST-ID)%",
    "client_id": "%REQ(X-SERIN-CLIENT-ID)%",
    "trace": "%REQ(TRACEPARENT):55%",
    "ms": "%DURATION%",
    "received_ms": "%REQUEST_DURATION%",
    "caller": "%DYNAMIC_METADATA(serin:caller)%",
}

REFUSAL_FIELDS = {
    "t": "%START_TIME(%s.%6f)%",
    "code": "%RESPONSE_CODE%",
    "grpc": "%GRPC_STATUS_NUMBER%",
    "why": "%RESPONSE_CODE_DETAILS%",
    "key": "%REQ(X-SERIN-REFUSED)%",
    "caller": "%DYNAMIC_METADATA(serin:caller)%",
    "path": "%PATH(NQ:ORIG_OR_PATH):200%",
    "from": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "bytes": "%BYTES_RECEIVED%",
    "proto": "%PROTOCOL%",
    "id": "%REQ(X-REQUEST-ID)%",
    "client_id": "%REQ(X-SERIN-CLIENT-ID)%",
}

ARM_HEADER = "x-serin-arm"
RATE_NAME = "refusals"
REFUSALS_STAT = "refusals"
LINES_PER_S, LINES_AT_ONCE = 5, 50


def request_log(path: Path) -> Document:
    """Returns the log with one JSON line per inference that was sent to a release, whatever its outcome."""
    return {
        "name": "requests",
        "filter": _header(ARM_HEADER),
        "typed_config": {"@type": FILE_LOG, "path": str(path), "log_format": {"json_format": LOG_FIELDS}},
    }


def refusal_logs(path: Path, rate: Path) -> list[Document]:
    """Returns the logs of refusals: lines of some, and counters of all by status. `rate`: the file with
    `rate_document`."""
    bucket = {"resource_name": RATE_NAME, "config_source": followed(rate)}
    limit = {"name": "rate", "typed_config": {"@type": LOG_RATE, "dynamic_config": bucket}}
    codes = (("code", "%RESPONSE_CODE%"), ("grpc", "%GRPC_STATUS_NUMBER%"))
    tags = [{"name": name, "value_format": value} for name, value in codes]
    counter = {"stat": {"name": "count", "tags": tags}, "value_fixed": 1}
    return [
        {
            "name": "refusals",
            "filter": _all(*_refused(), {"extension_filter": limit}),
            "typed_config": {
                "@type": FILE_LOG, "path": str(path), "log_format": {"json_format": REFUSAL_FIELDS},
            },
        },
        {
            "name": "refusal_counters",
            "filter": _all(*_refused()),
            "typed_config": {"@type": STATS_LOG, "stats_scope": {"prefix": REFUSALS_STAT}, "counters": [counter]},
        },
    ]  # fmt: skip


def rate_document() -> Document:
    """Returns the token bucket of the refusal log as a named resource."""
    bucket = {"max_tokens": LINES_AT_ONCE, "tokens_per_fill": LINES_PER_S, "fill_interval": "1s"}
    return {"name": RATE_NAME, "resource": {"@type": LOG_BUCKET, **bucket}}


def _refused() -> list[Document]:
    """Matches requests that were not sent to a release and were answered with an error of HTTP or gRPC."""
    sent = {"name": ARM_HEADER, "present_match": True, "invert_match": True}
    error = {"op": "GE", "value": {"default_value": 400, "runtime_key": "serin.refused_from"}}
    call = {"name": "content-type", "string_match": {"prefix": "application/grpc"}}
    failed = {"grpc_status_filter": {"statuses": ["OK"], "exclude": True}}
    either = [
        {"status_code_filter": {"comparison": error}},
        _all({"header_filter": {"header": call}}, failed),
    ]
    return [{"header_filter": {"header": sent}}, {"or_filter": {"filters": either}}]


def _header(name: str) -> Document:
    return {"header_filter": {"header": {"name": name, "present_match": True}}}


def _all(*filters: Document) -> Document:
    return {"and_filter": {"filters": list(filters)}}
