"""Releases scaled up and down by Kubernetes' own controller, on what the gateways and Triton count, under load."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest

from serin.cluster.kubernetes.autoscaler import FLOOR, IN_FLIGHT, QUEUE_TIME
from serin.errors import PredictionFailed
from serin.rollout.decide.state import Phase
from serin.serving.client.client import Client
from serin.store.store import Store
from tests.cluster import test_kubernetes_rollout as rollout
from tests.cluster.custom_metrics import custom_metrics
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, built, cluster_with_home
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

# A request waits in Triton, so that many are in flight without many cores.
SPEC = """
objectives: {latency_ms: 3000}
serving: {request_timeout: 20s, replicas: {min: 1, max: 3}, queue_delay: 250ms}
"""
BUSY, CALM = 10, 1
RELEASES = rollout.RELEASES
SCALERS = f"/apis/autoscaling/v2beta2/namespaces/{RELEASES}/horizontalpodautoscalers"
pytestmark = pytest.mark.timeout(2400)


class Counts:
    """The two metrics, read from the gateways and from Triton as Prometheus does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: dict[str, tuple[float, float]] = {}

    def measure(self, metric: str, release: str) -> float:
        return {IN_FLIGHT: self.in_flight, QUEUE_TIME: self.queue_ms}[metric](release)

    def in_flight(self, release: str) -> float:
        head = {"Authorization": f"Bearer {rollout.METRICS_TOKEN}"}
        pattern = rf'^envoy_cluster_upstream_rq_active{{envoy_cluster_name="{release}_(?:http|grpc)"}} (\S+)$'
        addresses = self._cluster.kubelet.resolve("gateway.serin.svc") or ()
        texts = [
            httpx.get(f"http://{each}:9464/gateway", headers=head, timeout=20).text for each in addresses
        ]
        return sum(float(value) for text in texts for value in re.findall(pattern, text, re.MULTILINE))

    def queue_ms(self, release: str) -> float:
        """The mean since the last call, which is none at the first one."""
        waited = requests = 0.0
        for address in self._cluster.kubelet.resolve(f"{release}.{RELEASES}.svc") or ():
            text = httpx.get(f"http://{address}:8002/metrics", timeout=20).text
            waited += _total(text, "nv_inference_queue_duration_us") / 1000
            requests += _total(text, "nv_inference_request_success")
        before, self._before[release] = self._before.get(release, (waited, requests)), (waited, requests)
        return max(waited - before[0], 0.0) / max(requests - before[1], 1.0)


def _total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory) as running, ExitStack() as stack:
        store = Store.open()
        for bias in (0.0, 1.0):
            bundles.publish(store, bias=bias, spec=SPEC)
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
        self.clients, self.answered, self.errors = BUSY, 0, list[str]()
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
        threads = [threading.Thread(target=self._call, args=(number,)) for number in range(BUSY)]
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


def test_a_release_grows_and_shrinks_with_its_load_and_no_client_notices(cluster: Cluster) -> None:
    rollout.start(1)
    now = rollout.ended(cluster, 1)
    assert now.phase is Phase.PROMOTED, now.reason
    assert ready(cluster, 1) == 1
    with Load(cluster).running() as load:
        wait_until(lambda: ready(cluster, 1) == 3, "three replicas", cluster.kubelet, 300.0)
        load.clients = CALM
        wait_until(lambda: ready(cluster, 1) == 1, "one replica again", cluster.kubelet, 300.0)
    assert load.errors == []
    assert load.answered > 50


def test_a_canary_is_scaled_by_its_share_and_the_stable_release_keeps_its_floor(cluster: Cluster) -> None:
    """The controller is killed while the floor is raised: the next one restores it."""
    with Load(cluster).running() as load:
        wait_until(lambda: ready(cluster, 1) == 3, "three replicas", cluster.kubelet, 300.0)
        rollout.start(2)
        rollout.until(cluster, 2, Phase.SHIFTING)
        assert floor(cluster, 1) == (3, True)
        wait_until(lambda: floor(cluster, 2) == (3, True), "what the last step needs", cluster.kubelet, 60.0)
        before = rollout.leader()
        (pod,) = [each for each in cluster.kubelet.pods.values() if each.name == before]
        pod.containers["controller"].signal(signal.SIGKILL)
        now = rollout.ended(cluster, 2)
        assert now.phase is Phase.PROMOTED, now.reason
        wait_until(lambda: floor(cluster, 2) == (1, False), "the floor restored", cluster.kubelet, 120.0)
        load.clients = CALM
        wait_until(lambda: ready(cluster, 2) == 1, "one replica again", cluster.kubelet, 300.0)
    assert load.errors == []
