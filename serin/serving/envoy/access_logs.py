"""The gateway's two logs. Pure.

`requests` has one line per inference that was sent to a release; rollouts take their evidence from it. `refusals` has
requests that the gateway refused itself, at most a few lines per second, so that a client that is refused a million
times does not fill the disk. Counters beside it count every refusal.
"""

from __future__ import annotations

from pathlib import Path

from serin.serving.envoy.api_types import (
    FILE_LOG,
    LOG_BUCKET,
    LOG_RATE,
    STATS_LOG,
    Document,
    extension,
    followed,
)

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
    sent = {"header_filter": {"header": {"name": ARM_HEADER, "present_match": True}}}
    return {"filter": sent, **_file_log("requests", path, LOG_FIELDS)}


def refusal_logs(path: Path, rate: Path) -> list[Document]:
    """Returns the logs of refusals: lines of some, and counters of all by status. `rate`: the file with
    `rate_document`."""
    bucket = {"resource_name": RATE_NAME, "config_source": followed(rate)}
    limit = {"extension_filter": extension("rate", LOG_RATE, dynamic_config=bucket)}
    codes = (("code", "%RESPONSE_CODE%"), ("grpc", "%GRPC_STATUS_NUMBER%"))
    tags = [{"name": name, "value_format": value} for name, value in codes]
    counters = [{"stat": {"name": "count", "tags": tags}, "value_fixed": 1}]
    counted = extension(
        "refusal_counters", STATS_LOG, stats_scope={"prefix": REFUSALS_STAT}, counters=counters
    )
    return [
        {"filter": _all(*_refused(), limit), **_file_log("refusals", path, REFUSAL_FIELDS)},
        {"filter": _all(*_refused()), **counted},
    ]


def _file_log(name: str, path: Path, fields: dict[str, str]) -> Document:
    return extension(name, FILE_LOG, path=str(path), log_format={"json_format": fields})


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


def _all(*filters: Document) -> Document:
    return {"and_filter": {"filters": list(filters)}}
