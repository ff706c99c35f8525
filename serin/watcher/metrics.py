"""Serves metrics to Prometheus on loopback: the stack's own, the gateway's, and where each release has its own.

/metrics   the stack's metrics, as OpenMetrics or Prometheus text
/gateway   Envoy's statistics, with native histograms for a scraper that accepts protobuf
/targets   the metrics addresses of the running releases, for Prometheus' HTTP service discovery

A scraper sends the token of the home: any user of the machine can reach the port. Everything is read from the stack's
files at the time of the scrape, so that a metric and the command that shows the same thing cannot differ.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from serin.errors import SerinError, SpecError, StateUnavailable
from serin.host.gpu_use import read_gpu_use
from serin.host.metrics_address import candidates, remove_address, token_file, write_address
from serin.host.windows import ask_windows, plans_folder
from serin.host.wiring import build_gateway
from serin.machine.durable import own_secret
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.capture.counters import models_captured, read_captures
from serin.monitoring.drift.read import read_drift
from serin.monitoring.objectives.read import read_objectives
from serin.monitoring.quality.view import read_quality
from serin.rollout.decide.evidence import Evidence
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import ModelStatus
from serin.rollout.run.story import point
from serin.serving.envoy.gateway import Gateway
from serin.serving.triton.release_record import read_record
from serin.spec.section import shortest
from serin.watcher.lookups_duty import last_lookups
from serin.watcher.served import last_statuses, served_models, state_home, watched_rollouts

Section = Callable[[Path], Iterable[Metric]]

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_NEEDS_TOKEN = b"send the token in metrics-token of the stack's home: Authorization: Bearer TOKEN\n"


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


def build(home: Path) -> Iterator[Metric]:
    del home
    yield InfoMetricFamily("serin", "The version of Serin.", {"version": importlib.metadata.version("serin")})


def releases(home: Path) -> Iterator[Metric]:
    live = gauge("serin_model_live_version", "The live version of each model.", "model")
    edition = gauge("serin_model_live_edition", "The edition of the live version's lookups.", "model")
    weight = gauge("serin_release_traffic_share", "The share of a model's requests that a release answers.",
                   "model", "release", "arm")  # fmt: skip
    for model in last_statuses(home):
        if model.live is not None:
            live.add_metric([model.name], model.live)
            edition.add_metric([model.name], model.live_edition)
        for release in model.releases:
            name = model.release_of(release).name
            weight.add_metric([model.name, name, release.arm], release.weight_percent / 100)
    yield from (live, edition, weight)


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
    for model in last_statuses(home):
        rollout = model.rollout
        name = f"{model.name}-v{rollout.label}"
        running.add_metric([model.name, name, rollout.phase], float(rollout.running))
        if rollout.running:
            held.add_metric([model.name, name, rollout.hold or ""], float(rollout.hold is not None))
            since.add_metric([model.name, name], rollout.since)
            for guard, ratio in _evidence(home, model):
                evidence.add_metric([model.name, name, guard], ratio)
    yield from (running, held, since, evidence)


def _evidence(home: Path, model: ModelStatus) -> Iterator[tuple[str, float]]:
    decision = watched_rollouts(home).last(model.name)
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
    books = dict.fromkeys([home, state_home(home) or home])  # of this host, and of all if this watcher leads
    for record in (each for book in books for each in read_alerts(book, resolved=0).open):
        if record.alert.facts.get("host"):
            continue  # its own watcher has it
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
    for state, model in _watched(home):
        view = read_drift(state, model)
        if view is None:
            continue
        drifted.add_metric([model, view.release], len(view.alarms))
        for column in view.columns:
            evidence.add_metric([model, view.release, column.name], column.evidence)
    yield from (evidence, drifted)


def quality(home: Path) -> Iterator[Metric]:
    """Each metric is from labels (`live`), from the test rows (`offline`) or expected before labels (`estimate`)."""
    value = gauge("serin_quality", "Quality of a release: from labels, from the test rows, or estimated.",
                  "model", "release", "metric", "basis")  # fmt: skip
    labelled = gauge(
        "serin_labelled_ratio", "The share of recorded rows that have a label.", "model", "release"
    )
    for state, model in _watched(home):
        view = read_quality(state, model)
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
    for state, model in _watched(home):
        view = read_objectives(state, model)
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


def _watched(home: Path) -> list[tuple[Path, str]]:
    """The models that this watcher watches, each with the home where it has what it knows: of several hosts, the leader
    has them."""
    state = state_home(home)
    return [] if state is None else [(state, model.name) for model in served_models(home)]


def lookups(home: Path) -> Iterator[Metric]:
    age = gauge("serin_lookup_age_seconds", "The time since the table of a live release's lookup was read.",
                "model", "release", "table")  # fmt: skip
    most = gauge("serin_lookup_max_age_seconds", "The age from which an alert fires (lookup.max_age of the spec).",
                 "model", "release", "table")  # fmt: skip
    rows = gauge("serin_lookup_rows", "The rows of a live release's lookup.", "model", "release", "table")
    for release, tables in last_lookups(home).items():
        for each in tables:
            labels = [release.model, release.name, each.table]
            age.add_metric(labels, time.time() - each.read)
            rows.add_metric(labels, each.rows)
            if each.max_age_s is not None:
                most.add_metric(labels, each.max_age_s)
    yield from (age, most, rows)


def events(home: Path) -> Iterator[Metric]:
    if not any(plans_folder(home).glob("*.json")):
        return  # no model here has online windows
    usable = gauge("serin_events_available", "Whether the events of online windows can be read and written.")
    counted = CounterMetricFamily(
        "serin_events",
        "Events of online windows, once for each window, by outcome.",
        labels=["model", "outcome"],
    )
    took = HistogramMetricFamily("serin_windows_seconds", "How long the windows of a request took.")
    keys = gauge("serin_events_keys", "The keys whose events are kept.")
    size = gauge("serin_events_bytes", "What the kept events take.")
    try:
        found = ask_windows(home, "/status", within_s=_TIMEOUT_S)
    except StateUnavailable:
        usable.add_metric([], 0.0)
        yield usable
        return
    usable.add_metric([], float("problem" not in found))
    for model, outcomes in found["models"].items():
        for outcome, count in outcomes.items():
            counted.add_metric([model, outcome], count)
    took.add_metric([], list(found["took"]["buckets"].items()), found["took"]["sum_s"])
    if "problem" not in found:
        keys.add_metric([], found["keys"])
        size.add_metric([], found["bytes"])
    yield from (usable, counted, took, keys, size)


_SECTIONS = (build, releases, rollouts, lookups, events, objectives, quality, drift, captures, alerts, leases)


def targets(home: Path) -> list[dict[str, Any]]:
    """Returns the running releases with the address of their Triton's metrics, as Prometheus reads them."""
    found = []
    for model in last_statuses(home):
        for entry in model.releases:
            name = model.release_of(entry).name
            record = read_record(home / "releases" / name)
            if record is not None:
                labels = {"model": model.name, "release": name, "arm": entry.arm}
                found.append({"targets": [f"127.0.0.1:{record.place.metrics_port}"], "labels": labels})
    return found


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = _TIMEOUT_S  # of a client that does not read

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        answer = {"/metrics": self._ours, "/gateway": self._gateway, "/targets": self._targets}.get(path)
        if answer is None:
            self._send(404, "text/plain; charset=utf-8", b"there are /metrics, /gateway and /targets\n")
            return
        try:
            if not self._is_allowed():
                self._send(401, "text/plain; charset=utf-8", _NEEDS_TOKEN)
                return
            content_type, body = answer()
        except (OSError, ValueError, SerinError) as error:
            self._send(503, "text/plain; charset=utf-8", f"{error}\n".encode())
            return
        self._send(200, content_type, body)

    def _is_allowed(self) -> bool:
        wanted = f"Bearer {own_secret(token_file(self.server.home))}"
        return hmac.compare_digest(self.headers.get("Authorization", "").encode(), wanted.encode())

    def _ours(self) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        return content_type, encode(self.server.registry)

    def _gateway(self) -> tuple[str, bytes]:
        return self.server.gateway.admin.metrics(accept=self.headers.get("Accept", ""))

    def _targets(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(targets(self.server.home)).encode()

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Writes nothing: a scrape every few seconds would fill the watcher's log."""


class MetricsServer(ThreadingHTTPServer):
    """The HTTP server, in threads of the watcher. A slow scraper delays no duty."""

    daemon_threads = True

    def __init__(self, home: Path, address: tuple[str, int], gateway: Gateway | None = None) -> None:
        self.home, self.gateway = home, gateway or build_gateway(home)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(StackCollector(home, _SECTIONS))
        own_secret(token_file(home))  # there before anybody asks
        super().__init__(address, _Handler)

    @classmethod
    def start(cls, home: Path) -> MetricsServer | None:
        """Starts serving at the first address that is free; None when there is none, which is logged."""
        trouble: list[str] = []
        try:
            addresses = candidates(home)
        except SpecError as error:
            log.warning("no metrics for Prometheus: %s", error)
            remove_address(home)
            return None
        for host, port in addresses:
            try:
                server = cls(home, (host, port))
            except OSError as error:
                trouble.append(f"{host}:{port}: {error}")
                continue
            port = int(server.server_address[1])
            write_address(home, host, port)
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
            log.info("metrics for Prometheus on http://%s:%d/metrics", host, port)
            return server
        log.warning("no metrics for Prometheus: cannot listen on %s", "; ".join(trouble))
        remove_address(home)
        return None

    def close(self) -> None:
        self.shutdown()
        self.server_close()
