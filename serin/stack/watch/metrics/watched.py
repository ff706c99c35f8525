"""Metrics of what the watcher knows about each model: its records, drift, quality and error budgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric

from serin.monitoring.capture.counters import models_captured, read_captures
from serin.monitoring.drift.read import read_drift
from serin.monitoring.objectives.read import read_objectives
from serin.monitoring.quality.view import read_quality
from serin.spec.section import shortest
from serin.stack.watch.metrics.families import gauge
from serin.stack.watch.served import served_models


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


def drift(home: Path) -> Iterator[Metric]:
    evidence = gauge("serin_drift_evidence_ratio", "Evidence of drift as a share of what an alarm needs.",
                     "model", "release", "column")  # fmt: skip
    drifted = gauge("serin_drift_columns", "How many columns and scores have drifted.", "model", "release")
    for model in _models(home):
        view = read_drift(home, model)
        if view is None:
            continue
        drifted.add_metric([model, view.release], len(view.alarms))
        alarmed = {
            alarm.column for alarm in view.alarms
        }  # their evidence begins again when the alarm is raised
        for column in view.columns:
            value = 1.0 if column.name in alarmed else column.evidence
            evidence.add_metric([model, view.release, column.name], value)
    yield from (evidence, drifted)


def quality(home: Path) -> Iterator[Metric]:
    """Each metric is from labels (`live`), from the test rows (`offline`) or expected before labels (`estimate`)."""
    value = gauge("serin_quality", "Quality of a release: from labels, from the test rows, or estimated.",
                  "model", "release", "metric", "basis")  # fmt: skip
    labelled = gauge(
        "serin_labelled_ratio", "The share of recorded rows that have a label.", "model", "release"
    )
    for model in _models(home):
        view = read_quality(home, model)
        for release in view.releases if view else ():
            for basis, found in (("live", release.metrics), ("offline", release.offline)):
                for metric, measured in found.items():
                    value.add_metric([model, release.release, metric, basis], measured.value)
            for metric, expected in release.estimate.items():
                value.add_metric([model, release.release, metric, "estimate"], expected.value)
            if release.coverage is not None:
                labelled.add_metric([model, release.release], release.coverage)
    yield from (value, labelled)


def objectives(home: Path) -> Iterator[Metric]:
    target = gauge("serin_objective_ratio", "The share of requests that must be good.", "model", "objective")
    left = gauge("serin_objective_budget_remaining_ratio", "The share of the 30-day error budget that is left.",
                 "model", "objective")  # fmt: skip
    burn = gauge("serin_objective_burn_rate", "How many times too fast the error budget burns, by window.",
                 "model", "objective", "window")  # fmt: skip
    gone = gauge("serin_requests_gone_ratio",
                 "The share of requests whose client left before it had waited as long as promised, by window.",
                 "model", "window")  # fmt: skip
    for model in _models(home):
        view = read_objectives(home, model)
        for window_s, share in view.gone.items() if view else ():
            gone.add_metric([model, shortest(window_s)], share)
        for objective in view.objectives if view else ():
            target.add_metric([model, objective.name], objective.target)
            if objective.budget_left is not None:
                left.add_metric([model, objective.name], objective.budget_left)
            rates = {window.window_s: window.burn for window in objective.windows}  # 6 h is in two pairs
            for window_s, rate in rates.items():
                burn.add_metric([model, objective.name, shortest(window_s)], rate)
    yield from (target, left, burn, gone)


def _models(home: Path) -> list[str]:
    return [model.name for model in served_models(home)]
