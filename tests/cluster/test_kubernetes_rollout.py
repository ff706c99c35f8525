"""Rollouts on Kubernetes with the manifests' controller and gateway: promoted, rolled back, and led by another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serin.errors import PredictionFailed
from serin.serving.client.client import predict
from serin.store.objects import open_objects
from serin.store.store import Store
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, built, running_cluster
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

SPEC = (
    "serving: {p99_ms: 3000, request_timeout: 10s, replicas: 2}\n"
    "rollout: {steps: [50, 100], step_time: 3s, min_requests: 30, warmup: 0s, bake: 3s, deadline: 10m, "
    "max_slow_share: 0.5, latency: {margin: 3.0, bad_margin: 8.0}}\n"
)
PARTS = {"controller", "gateway", "serin-release-template"}
RELEASES = "serin-releases"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with (
        running_cluster(tmp_path_factory.mktemp("cluster")) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in running.store.items():
            patch.setenv(name, value)
        patch.setenv("SERIN_HOME", str(tmp_path_factory.mktemp("home")))
        store = Store.open()
        for bias in (0.0, 1.0, 2.0):
            bundles.publish(store, bias=bias, spec=SPEC)
        running.add_settings()
        parts = built(MANIFESTS / "overlays" / "cpu")
        kinds = ("Deployment", "Service", "ConfigMap")
        running.plane.apply(
            [each for each in parts if each["metadata"]["name"] in PARTS and each["kind"] in kinds]
        )
        wait_until(lambda: len(gateways(running)) == 2, "two gateways", running.kubelet, 400.0)
        wait_until(lambda: leader() != "", "a leading controller", running.kubelet, 400.0)
        yield running


def gateways(cluster: Cluster) -> list[str]:
    return [f"{address}:8080" for address in cluster.kubelet.resolve("gateway.serin.svc") or ()]


def leader() -> str:
    """Returns the pod of the controller that leads."""
    found = open_objects(os.environ["SERIN_STORE"]).read("cluster/leader.json")
    return str(json.loads(found.content)["holder"]).partition("/")[0] if found else ""


def roll_out(version: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serin.cli", "rollout", "start", MODEL, str(version)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str], within_s: float = 500.0) -> tuple[int, str]:
    output, _ = process.communicate(timeout=within_s)
    return process.returncode, output


def decisions() -> list[dict[str, Any]]:
    objects = open_objects(os.environ["SERIN_STORE"])
    found = [objects.read(key) for key in sorted(objects.keys(f"rollouts/{MODEL}/decisions/"))]
    return [json.loads(each.content) for each in found if each]


class Load:
    """Clients of all gateways, one request after the other. `errors`: what any of them got instead of a score."""

    def __init__(self) -> None:
        self.answered, self.errors = 0, list[str]()
        self._stop = threading.Event()

    def _call(self, places: list[str], number: int) -> None:
        rows = bundles.rows(2, seed=number)
        while not self._stop.is_set():
            try:
                predict(places[number % len(places)], MODEL, rows, SCHEMA, "http", timeout_s=15.0)
                self.answered += 1
            except PredictionFailed as error:
                self.errors.append(str(error))
            time.sleep(0.02)

    @contextmanager
    def running(self, cluster: Cluster) -> Iterator[Load]:
        places = gateways(cluster)
        threads = [threading.Thread(target=self._call, args=(places, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()


def _wait_for_phase(cluster: Cluster, version: int, phase: str) -> None:
    def reached() -> bool:
        last = decisions()[-1]
        return f'"{phase}"' in json.dumps(last) and f"{MODEL}-v{version}" in json.dumps(last)

    wait_until(reached, f"version {version} {phase}", cluster.kubelet, 300.0)


def live_deployments(cluster: Cluster) -> set[str]:
    found = cluster.plane.call("GET", f"/apis/apps/v1/namespaces/{RELEASES}/deployments")["items"]
    return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


def test_the_first_version_is_verified_and_served_by_every_gateway(cluster: Cluster) -> None:
    code, output = finished(roll_out(1))
    assert code == 0, output
    own = bundles.score(Store.open().bundle(MODEL, 1).path, bundles.rows(3))
    for place in gateways(cluster):
        assert (predict(place, MODEL, bundles.rows(3), SCHEMA, "grpc")["score"] == own).all()
    assert live_deployments(cluster) == {f"{MODEL}-v1"}


def test_a_rollout_is_promoted_although_its_controller_dies(cluster: Cluster) -> None:
    before = leader()
    with Load().running(cluster) as load:
        process = roll_out(2)
        _wait_for_phase(cluster, 2, "shifting")
        (pod,) = [each for each in cluster.kubelet.pods.values() if each.name == before]
        pod.containers["controller"].signal(signal.SIGSTOP)
        wait_until(lambda: leader() != before, "another leader", cluster.kubelet, 60.0)
        pod.containers["controller"].signal(signal.SIGKILL)
        code, output = finished(process)
    assert code == 0, output
    assert load.errors == []
    assert load.answered > 100
    assert live_deployments(cluster) == {f"{MODEL}-v2"}
    numbers = [each["seq"] for each in decisions()]
    assert numbers == list(range(1, len(numbers) + 1)), "no decision is doubled or lost"


def test_a_candidate_whose_pods_die_is_rolled_back_and_no_client_notices(cluster: Cluster) -> None:
    with Load().running(cluster) as load:
        process = roll_out(3)
        _wait_for_phase(cluster, 3, "shifting")
        for pod in cluster.kubelet.pods_with(RELEASES, {"serin.dev/release": f"{MODEL}-v3"}):
            pod.containers["triton"].signal(signal.SIGKILL)
        code, output = finished(process)
    assert code == 1, output
    assert "rolled back" in output
    assert load.errors == []
    wait_until(
        lambda: live_deployments(cluster) == {f"{MODEL}-v2"}, "the candidate gone", cluster.kubelet, 60.0
    )


def test_a_gateway_that_is_replaced_holds_nothing(cluster: Cluster) -> None:
    old = {each.name for each in cluster.kubelet.pods_with("serin", {"app.kubernetes.io/name": "gateway"})}
    gone = min(old)
    cluster.plane.call("DELETE", f"/api/v1/namespaces/serin/pods/{gone}")
    objects = open_objects(os.environ["SERIN_STORE"])

    def replaced() -> bool:
        hosts = {key.split("/")[2] for key in objects.keys("cluster/hosts/")}
        return gone not in hosts and len(hosts) == 2 and len(gateways(cluster)) == 2

    wait_until(replaced, "a new gateway in the place of the old", cluster.kubelet, 120.0)
