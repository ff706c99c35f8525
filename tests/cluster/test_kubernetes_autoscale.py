"""Releases scaled up and down by Kubernetes' own controller, on what the gateways count, under load."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import onnx
import pytest

from serin.cluster.kubernetes.autoscaler import FLOOR, IN_FLIGHT, PER_SECOND
from serin.cluster.kubernetes.release_objects import RELEASE_LABEL
from serin.errors import PredictionFailed
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.decide.verdict import SPLIT_AT
from serin.rollout.run.commands import Command
from serin.serving.client.client import Client
from serin.serving.triton.repository import FORMAT, VERSION
from serin.store.store import Store
from tests.cluster import test_kubernetes_rollout as rollout
from tests.cluster.autoscale_recording import Recording, draw
from tests.cluster.custom_metrics import custom_metrics
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, built, cluster_with_home
from tests.cluster.pod import Pod
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

# A request waits in Triton, so that many are in flight without many cores.
SPEC = """
objectives: {latency_ms: 3000}
serving: {request_timeout: 20s, replicas: {min: 1, max: 3}, queue_delay: 250ms}
"""
# What `serin tune` would have measured, on machines that this one is not: only the autoscaler reads it.
TUNED = f"format: {FORMAT}\nversion: {VERSION}\nmachine: {{cores: 64}}\nserving: {{}}\n"
CAPACITY = "capacity: {in_flight: 2, requests_per_s: 10}\n"
CROWD, BUSY, CALM = 16, 10, 1
RELEASES = rollout.RELEASES
SCALERS = f"/apis/autoscaling/v2beta2/namespaces/{RELEASES}/horizontalpodautoscalers"
pytestmark = pytest.mark.timeout(2400)


class Counts:
    """The two metrics, read from the gateways as Prometheus does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: dict[str, tuple[float, float]] = {}

    def measure(self, metric: str, release: str) -> float:
        return {IN_FLIGHT: self.in_flight, PER_SECOND: self.per_second}[metric](release)

    def in_flight(self, release: str) -> float:
        return self._total("envoy_cluster_upstream_rq_active", release)

    def per_second(self, release: str) -> float:
        """The mean since the last call, which is none at the first one."""
        now, total = time.monotonic(), self._total("envoy_cluster_upstream_rq_total", release)
        before, self._before[release] = self._before.get(release, (now, total)), (now, total)
        return max(total - before[1], 0.0) / max(now - before[0], 0.1)

    def _total(self, name: str, release: str) -> float:
        head = {"Authorization": f"Bearer {rollout.METRICS_TOKEN}"}
        pattern = rf'^{name}{{envoy_cluster_name="{release}_(?:http|grpc)"}} (\S+)$'
        addresses = self._cluster.kubelet.resolve("gateway.serin.svc") or ()
        texts = [
            httpx.get(f"http://{each}:9464/gateway", headers=head, timeout=20).text for each in addresses
        ]
        return sum(float(value) for text in texts for value in re.findall(pattern, text, re.MULTILINE))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory) as running, ExitStack() as stack:
        store = Store.open()
        for bias in (0.0, 1.0, 2.0):
            bundles.publish(store, bias=bias, spec=SPEC)
        store.shared_files().put(f"tuned/{MODEL}/64-cores.yaml", (TUNED + CAPACITY).encode())
        access = rollout.Access.create(tmp_path_factory.mktemp("access"), running)
        running.add_settings(secrets=access.secrets)
        kinds = ("Deployment", "Service", "ConfigMap")
        parts = [
            each
            for each in built(MANIFESTS / "overlays" / "cpu")
            if each["metadata"]["name"] in rollout.PARTS and each["kind"] in kinds
        ]
        for each in parts:
            if each["metadata"]["name"] == "serin-release-template":
                each["data"] = {name: _impatient(text) for name, text in each["data"].items()}
        running.plane.apply(parts)
        wait_until(lambda: len(rollout.gateways(running)) == 2, "two gateways", running.kubelet, 400.0)
        wait_until(lambda: rollout.leader() != "", "a leading controller", running.kubelet, 400.0)
        rollout.ACCESS.append(access)
        stack.enter_context(custom_metrics(running.plane, Counts(running).measure))
        yield running


def _impatient(template: str) -> str:
    """Scales down within seconds instead of minutes, and changes nothing else."""
    found = template.replace("stabilizationWindowSeconds: 300", "stabilizationWindowSeconds: 4")
    assert found != template
    return found.replace("periodSeconds: 60}", "periodSeconds: 4}")


class Load:
    """Clients that send one request after the other; only the first `clients` of them do."""

    def __init__(self, cluster: Cluster) -> None:
        self.clients, self.answered, self.errors = 0, 0, list[str]()
        self._places, self._stop = rollout.gateways(cluster), threading.Event()

    def _call(self, number: int) -> None:
        access, rows = rollout.ACCESS[-1], bundles.rows(2, seed=number)
        place = self._places[number % len(self._places)]
        client = Client(place, MODEL, api_key=access.key, ca=access.ca, timeout_s=25.0, retries=0)
        with closing(client):
            while not self._stop.is_set():
                if number >= self.clients:
                    self._stop.wait(0.1)
                    continue
                try:
                    client.predict_wire(rows, SCHEMA)
                    self.answered += 1
                except PredictionFailed as error:
                    self.errors.append(f"{time.strftime('%H:%M:%S')} {error}")

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._call, args=(number,)) for number in range(CROWD)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()


def ready(cluster: Cluster, version: int) -> int:
    """Returns the ready replicas of a version."""
    path = f"/apis/apps/v1/namespaces/{RELEASES}/deployments/{MODEL}-v{version}"
    return int(cluster.plane.call("GET", path).get("status", {}).get("readyReplicas", 0))


def floor(cluster: Cluster, version: int) -> tuple[int, bool]:
    """Returns the least replicas of a version, and whether a rollout has set it."""
    found = cluster.plane.call("GET", f"{SCALERS}/{MODEL}-v{version}")
    return int(found["spec"]["minReplicas"]), FLOOR in found["metadata"].get("annotations", {})


def pods_of(cluster: Cluster, version: int) -> list[Pod]:
    return cluster.kubelet.pods_with(RELEASES, {RELEASE_LABEL: f"{MODEL}-v{version}"})


def grows_to(cluster: Cluster, version: int, replicas: int) -> None:
    what = f"{replicas} replicas of version {version}"
    wait_until(lambda: ready(cluster, version) == replicas, what, cluster.kubelet, 400.0)


@pytest.fixture(scope="module")
def recording(cluster: Cluster) -> Iterator[Recording]:
    """What happened, second by second. AUTOSCALE_PICTURE names a file for a picture of it."""
    path = os.environ.get("AUTOSCALE_PICTURE")
    with Recording(cluster, RELEASES).running() as made:
        yield made
    if path:
        draw(made.rows, Path(path))


@pytest.fixture
def load(cluster: Cluster, recording: Recording) -> Iterator[Load]:
    with Load(cluster).running() as running:
        recording.follow(lambda: (running.clients, running.answered, len(running.errors)))
        yield running


def test_a_release_grows_and_shrinks_with_its_load_and_no_client_notices(
    cluster: Cluster, load: Load
) -> None:
    rollout.start(1)
    now = rollout.ended(cluster, 1)
    assert now.phase is Phase.PROMOTED, now.reason
    assert ready(cluster, 1) == 1
    load.clients = BUSY
    grows_to(cluster, 1, 3)
    load.clients = CALM
    grows_to(cluster, 1, 1)
    assert load.errors == []
    assert load.answered > 50


def test_a_replica_that_answers_its_golden_rows_wrongly_gets_no_traffic(cluster: Cluster, load: Load) -> None:
    """The model of every pod that starts in the meantime is another one, as on a node with a fault."""

    def damage(pod: Pod, volumes: Mapping[str, Path]) -> None:
        folder = volumes["home"] / "releases" / f"{MODEL}-v1" / "repository"
        for model in folder.rglob("model.onnx"):
            model.unlink()
            onnx.save(bundles.graph(bias=5.0), model)
            damaged.append(pod)

    def said(pod: Pod) -> str:
        found = cluster.plane.call("GET", f"/api/v1/namespaces/{RELEASES}/pods/{pod.name}")["status"]
        return "".join(
            str(each.get("lastState", {}).get("terminated", {}).get("message", ""))
            for each in found.get("containerStatuses", ())
        )

    damaged: list[Pod] = []
    cluster.kubelet.prepared = damage
    try:
        load.clients = BUSY
        wait_until(lambda: len(damaged) == 2, "two more replicas", cluster.kubelet, 300.0)
        for pod in damaged:
            wait_until(lambda each=pod: said(each), "why it is not ready", cluster.kubelet, 300.0)  # type: ignore[misc]
            assert "rows differ in 'score'" in said(pod)
        assert ready(cluster, 1) == 1
    finally:
        cluster.kubelet.prepared = lambda _, __: None
    for pod in damaged:
        cluster.plane.call("DELETE", f"/api/v1/namespaces/{RELEASES}/pods/{pod.name}")
    grows_to(cluster, 1, 3)
    load.clients = CALM
    grows_to(cluster, 1, 1)
    assert load.errors == []


def test_replicas_come_and_go_beside_a_canary_and_no_client_notices(
    cluster: Cluster, load: Load, recording: Recording
) -> None:
    """The controller is killed while floors are raised: the next one continues, and restores them."""
    load.clients = CALM
    rollout.start(2, plan=replace(rollout.PLAN, steps=(25.0, 50.0, 100.0)))
    rollout.until(cluster, 2, Phase.SHIFTING)
    rollout.ask(Command(kind="pause", model=MODEL, by="test"))
    load.clients = CROWD
    grows_to(cluster, 1, 3)
    grows_to(cluster, 2, 3)
    assert floor(cluster, 1) == (3, True)
    load.clients = CALM
    grows_to(cluster, 2, 2)  # what the next step needs
    assert ready(cluster, 1) == 3
    drained = pods_of(cluster, 2)[0]
    cluster.plane.call("DELETE", f"/api/v1/namespaces/{RELEASES}/pods/{drained.name}")
    wait_until(lambda: drained.ended, "a replica drained", cluster.kubelet, 120.0)
    grows_to(cluster, 2, 2)
    load.clients = BUSY
    before = rollout.leader()
    (pod,) = [each for each in cluster.kubelet.pods.values() if each.name == before]
    pod.containers["controller"].signal(signal.SIGKILL)
    wait_until(lambda: rollout.leader() not in ("", before), "another leader", cluster.kubelet, 200.0)
    rollout.ask(Command(kind="resume", model=MODEL, by="test"))
    now = rollout.ended(cluster, 2)
    assert now.phase is Phase.PROMOTED, now.reason
    check_evidence(now)
    whole = [row for row in recording.rows if row.share == 100 and f"{MODEL}-v2" in row.ready]
    assert whole[0].ready[f"{MODEL}-v2"] == 3, "all replicas of the last step were ready before it began"
    wait_until(lambda: floor(cluster, 2) == (1, False), "the floor restored", cluster.kubelet, 120.0)
    load.clients = CALM
    grows_to(cluster, 2, 1)
    assert load.errors == []


def check_evidence(now: Rollout) -> None:
    """No request of either arm failed, and the candidate had its share of them at every weight."""
    judged = [
        Evidence.from_json(each.evidence["guards"])
        for each in rollout.rollouts().decisions(MODEL, now.id)
        if each.evidence.get("guards")
    ]
    assert max(each.candidate.requests for each in judged) >= rollout.PLAN.min_requests
    assert {(each.candidate.errors, each.stable.errors) for each in judged} == {(0, 0)}
    assert max(each.split_evidence for each in judged) < SPLIT_AT


def test_a_candidate_that_is_killed_at_half_of_the_traffic_is_rolled_back_and_no_client_notices(
    cluster: Cluster, load: Load
) -> None:
    load.clients = BUSY
    grows_to(cluster, 2, 3)
    rollout.start(3)
    rollout.until(cluster, 3, Phase.SHIFTING)
    wait_until(lambda: len(pods_of(cluster, 3)) >= 2, "two replicas", cluster.kubelet, 120.0)
    killed, *deleted = pods_of(cluster, 3)
    killed.containers["triton"].signal(signal.SIGKILL)
    for pod in deleted:
        place = f"/api/v1/namespaces/{RELEASES}/pods/{pod.name}"
        cluster.plane.call("DELETE", place, {"gracePeriodSeconds": 0})
    now = rollout.ended(cluster, 3)
    assert now.phase is Phase.ROLLED_BACK, now.reason
    wait_until(lambda: floor(cluster, 2) == (1, False), "the floor restored", cluster.kubelet, 120.0)
    load.clients = CALM
    grows_to(cluster, 2, 1)
    assert load.errors == []
