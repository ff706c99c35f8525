"""Collects the stack's metrics for Prometheus: releases, rollouts, alerts, GPU leases.

Everything is read from the stack's files at the time of the scrape, so that a metric and the command that shows the
same thing cannot differ.
"""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from serin.formats.serving.journal import last_decision
from serin.monitoring.alerts.read import read_alerts
from serin.rollout.decide.evidence import Evidence
from serin.rollout.run.record import JournalFolder, decision2rollout
from serin.rollout.run.status import ModelStatus, ReleaseStatus, status
from serin.rollout.run.story import point
from serin.stack.gpu_use import read_gpu_use
from serin.store.artifacts import Release

Section = Callable[[Path], Iterable[Metric]]


class StackCollector(Collector):
    """Reads all sections when Prometheus asks. A section that fails is left out and counted, never the others."""

    def __init__(self, home: Path, sections: Iterable[Section]) -> None:
        self._home, self._sections = home, tuple(sections)

    def collect(self) -> Iterator[Metric]:
        began = time.monotonic()
        failed = gauge(
            "serin_metrics_section_failed", "Whether this part of the metrics could not be read.", "section"
        )
        for section in self._sections:
            trouble = 0.0
            try:
                yield from list(section(self._home))
            except (OSError, ValueError, KeyError, LookupError, RuntimeError):
                trouble = 1.0
            failed.add_metric([section.__name__], trouble)
        yield failed
        took = gauge("serin_metrics_seconds", "How long it took to collect these metrics.")
        took.add_metric([], time.monotonic() - began)
        yield took


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def release_name(model: str, entry: ReleaseStatus) -> str:
    return Release(model=model, version=entry.version, baseline=entry.arm == "baseline").name


def build(home: Path) -> Iterator[Metric]:
    del home
    yield InfoMetricFamily("serin", "The version of Serin.", {"version": importlib.metadata.version("serin")})


def releases(home: Path) -> Iterator[Metric]:
    live = gauge("serin_model_live_version", "The live version of each model.", "model")
    weight = gauge("serin_release_traffic_share", "The share of a model's requests that a release answers.",
                   "model", "release", "arm")  # fmt: skip
    for model in status(home):
        if model.live is not None:
            live.add_metric([model.name], model.live)
        for release in model.releases:
            name = release_name(model.name, release)
            weight.add_metric([model.name, name, release.arm], release.weight_percent / 100)
    yield live
    yield weight


def rollouts(home: Path) -> Iterator[Metric]:
    running = gauge("serin_rollout_running", "Whether a rollout runs now; its version, phase and step.",
                    "model", "release", "phase")  # fmt: skip
    held = gauge("serin_rollout_held", "Whether a rollout waits for a person or for traffic, and why.",
                 "model", "release", "reason")  # fmt: skip
    since = gauge("serin_rollout_phase_start_seconds", "When the current phase began.", "model", "release")
    evidence = gauge(
        "serin_rollout_evidence_ratio",
        "Evidence against the candidate as a share of what rolls it back, on a logarithmic scale: 1 rolls back.",
        "model", "release", "guard",
    )  # fmt: skip
    for model in status(home):
        rollout = model.rollout
        name = f"{model.name}-v{rollout.version}"
        running.add_metric([model.name, name, rollout.phase], float(rollout.running))
        if rollout.running:
            held.add_metric([model.name, name, rollout.hold or ""], float(rollout.hold is not None))
            since.add_metric([model.name, name], rollout.since)
            for guard, ratio in _evidence(home, model):
                evidence.add_metric([model.name, name, guard], ratio)
    yield from (running, held, since, evidence)


def _evidence(home: Path, model: ModelStatus) -> Iterator[tuple[str, float]]:
    decision = last_decision(JournalFolder(home).path(model.name))
    if decision is None or not decision.evidence.get("guards"):
        return
    now = decision2rollout(decision)
    found = point(now, Evidence.from_json(decision.evidence["guards"]), decision.t)
    enough = math.log(now.plan.rollback_at)
    for guard, e_value in (("all", found.total), *found.e_values.items()):
        yield guard, max(math.log(max(e_value, 1e-300)) / enough, 0.0)


def alerts(home: Path) -> Iterator[Metric]:
    firing = gauge("serin_alert_firing", "Alerts that are open; 0: silenced or acknowledged.",
                   "model", "release", "kind", "severity", "alert")  # fmt: skip
    began = gauge("serin_alert_since_seconds", "When what an open alert is about began.", "model", "alert")
    for record in read_alerts(home, resolved=0).open:
        alert = record.alert
        quiet = record.silenced_until is not None or record.acknowledged is not None
        firing.add_metric(
            [alert.model, alert.release, alert.kind, alert.severity, alert.key], float(not quiet)
        )
        began.add_metric([alert.model, alert.key], alert.since)
    yield firing
    yield began


def leases(home: Path) -> Iterator[Metric]:
    held = gauge("serin_gpu_leases", "Leases on a GPU now.", "gpu", "kind")
    memory = gauge("serin_gpu_memory_bytes", "Memory of a GPU.", "gpu")
    used = gauge("serin_gpu_memory_used_bytes", "Memory of a GPU in use by all processes.", "gpu")
    reserved = gauge("serin_gpu_memory_reserved_bytes", "Memory reserved for a release.", "gpu", "release")
    for gpu in read_gpu_use(home):
        name = gpu.device.id
        memory.add_metric([name], gpu.device.memory_bytes)
        for kind in ("exclusive", "shared"):
            held.add_metric([name, kind], sum(holder.kind == kind for holder in gpu.holders))
        if gpu.used_bytes is not None:
            used.add_metric([name], gpu.used_bytes)
        for release in gpu.releases:
            reserved.add_metric([name, release.release], release.reserved_bytes)
    yield from (held, memory, used, reserved)
