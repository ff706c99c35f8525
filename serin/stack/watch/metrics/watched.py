"""Metrics of what the watcher knows about each model: records of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric

from serin.monitoring.capture.counters import models_captured, read_captures
from serin.stack.watch.metrics.families import gauge


def captures(home: Path) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "serin_captured_requests",
        "Requests that were drawn to be recorded.",
        labels=["model", "release", "outcome"],
    )
    rows = CounterMetricFamily("serin_captured_rows", "Rows that were recorded.", labels=["model", "release"])
    share = gauge("serin_capture_share", "The share of requests that is recorded.", "model", "release")
    size = gauge("serin_captures_bytes", "Disk space of the records of a model.", "model")
    for model in models_captured(home):
        view = read_captures(home, model)
        if view is None:
            continue
        size.add_metric([model], view.bytes)
        for release, counts in view.releases.items():
            requests.add_metric([model, release, "recorded"], counts.requests)
            requests.add_metric([model, release, "dropped"], counts.dropped)
            rows.add_metric([model, release], counts.rows)
            share.add_metric([model, release], counts.share)
    yield from (requests, rows, share, size)
