"""Rollouts on Kubernetes with the manifests' controller and gateway: promoted, rolled back, and led by another one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Literal

import pytest

from serin.errors import PredictionFailed
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.access import Rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.record import decision2rollout
from serin.serving.client.client import Answers, Client
from serin.serving.envoy.keys import KeyFile
from serin.store.open import open_objects
from serin.store.store import Store
from tests.cluster.documented_rights import IDENTITIES
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, built, cluster_with_home
from tests.cluster.pod import Pod
from tests.e2e.serving_certificates import Authority
from tests.kit.commands import serin_process
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

SPEC = """
objectives: {latency_ms: 3000}
serving: {request_timeout: 10s, replicas: 2}
monitoring: {capture: {share: 1}}
"""
PLAN = Plan(
    steps=(50.0, 100.0), step_s=3.0, min_requests=30, margin=3.0, bad_margin=8.0, warmup_s=0.0, bake_s=3.0,
    deadline_s=600.0, slo_ms=None, load_s=300.0,
)  # fmt: skip
PARTS = {"controller", "gateway", "serin-release-template"}
METRICS_TOKEN = token_urlsafe(32)
pytestmark = pytest.mark.timeout(2400)  # a busy machine takes its time; each wait has its own limit
RELEASES = "serin-releases"
APPROVED = "approved"  # a model that gets no requests but by an approval
WHOLE = f"""
name: {APPROVED}
data: {{tables: {{flights: flights.parquet}}, target: {{expression: arr_delay > 15, task: binary}}}}
features: [{{columns: [temp, distance], steps: [fill_median]}}, {{columns: [carrier, night], steps: [categorify]}}]
"""  # the rest of a spec: commands read it


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory, rights=IDENTITIES) as running:
        store = Store.open()
        for bias in (0.0, 1.0, 2.0):
            bundles.publish(store, bias=bias, spec=SPEC)
        bundles.publish(store, bias=0.0, spec=SPEC + WHOLE, model=APPROVED)
        access = Access.create(tmp_path_factory.mktemp("access"), running)
        running.add_settings(secrets=access.secrets)
        parts = built(MANIFESTS / "overlays" / "cpu")
        kinds = ("Deployment", "Service", "ConfigMap")
        running.plane.apply(
            [each for each in parts if each["metadata"]["name"] in PARTS and each["kind"] in kinds]
        )
        wait_until(lambda: len(gateways(running)) == 2, "two gateways", running.kubelet, 400.0)
        wait_until(lambda: leader() != "", "a leading controller", running.kubelet, 400.0)
        ACCESS.append(access)
        yield running


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a client needs. `secrets`: what the gateways have of it."""

    key: str
    ca: Path
    secrets: Mapping[str, Mapping[str, str]]

    @classmethod
    def create(cls, folder: Path, cluster: Cluster) -> Access:
        authority, keys = Authority(), KeyFile(path=folder / "keys.json")
        _, key = keys.create("test")
        prefix = cluster.kubelet.network.gateway.rpartition(".")[0]
        pair = authority.pair(addresses=[f"{prefix}.{number}" for number in range(1, 255)])
        (folder / "ca.pem").write_bytes(authority.certificate)
        tls = {"tls.crt": pair.certificate.decode(), "tls.key": pair.key.decode()}
        secrets = {
            "serin-gateway-tls": tls,
            "serin-gateway-keys": {"keys.json": keys.path.read_text()},
            "serin-gateway-metrics": {"token": METRICS_TOKEN},
        }
        return cls(key=key, ca=folder / "ca.pem", secrets=secrets)

    def predict(self, place: str, rows: Mapping[str, Any], protocol: Literal["http", "grpc"]) -> Answers:
        client = Client(
            place, MODEL, protocol=protocol, api_key=self.key, ca=self.ca, timeout_s=15.0, retries=0
        )
        with closing(client):
            return client.predict_wire(rows, SCHEMA)


ACCESS: list[Access] = []  # of the cluster that runs


def gateways(cluster: Cluster) -> list[str]:
    return [f"https://{address}:8443" for address in cluster.kubelet.resolve("gateway.serin.svc") or ()]


def leader() -> str:
    """Returns the pod of the controller that leads."""
    found = open_objects(os.environ["SERIN_STORE"]).read("cluster/leader.json")
    return str(json.loads(found.content)["holder"]).partition("/")[0] if found else ""


def rollouts() -> Rollouts:
    return Rollouts(open_objects(os.environ["SERIN_STORE"]))


def start(version: int, model: str = MODEL, plan: Plan = PLAN) -> None:
    ask(Command(kind="start", model=model, version=version, by="test", plan=plan))


def ask(command: Command) -> None:
    answer = rollouts().mailbox.ask(command, timeout_s=60.0)
    assert answer.accepted, answer.reason


def until(cluster: Cluster, version: int, *phases: Phase, within_s: float = 400.0) -> Rollout:
    """Returns the rollout of a version once it is in one of these phases."""

    def reached() -> Rollout | None:
        last = rollouts().last(MODEL)
        now = decision2rollout(last) if last else None
        return now if now and now.candidate.version == version and now.phase in phases else None

    found = wait_until(reached, f"version {version} {phases[0]}", cluster.kubelet, within_s)
    assert isinstance(found, Rollout)
    return found


def ended(cluster: Cluster, version: int) -> Rollout:
    return until(cluster, version, Phase.PROMOTED, Phase.ROLLED_BACK)


class Load:
    """Clients of all gateways, one request after the other. `errors`: what any of them got instead of a score."""

    def __init__(self) -> None:
        self.answered, self.errors = 0, list[str]()
        self._stop = threading.Event()

    def _call(self, places: list[str], number: int) -> None:
        rows = bundles.rows(2, seed=number)
        while not self._stop.is_set():
            try:
                ACCESS[-1].predict(places[number % len(places)], rows, "http")
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


def live_deployments(cluster: Cluster) -> set[str]:
    found = cluster.plane.call("GET", f"/apis/apps/v1/namespaces/{RELEASES}/deployments")["items"]
    return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


def test_the_first_version_is_verified_and_served_by_every_gateway(cluster: Cluster) -> None:
    start(1)
    now = ended(cluster, 1)
    assert now.phase is Phase.PROMOTED, now.reason
    own = bundles.score(Store.open().bundle(MODEL, 1).path, bundles.rows(3))
    for place in gateways(cluster):
        assert (ACCESS[-1].predict(place, bundles.rows(3), "grpc")["score"] == own).all()
        with pytest.raises(PredictionFailed, match="401"):
            replace(ACCESS[-1], key="serin_unknown").predict(place, bundles.rows(3), "http")
    assert live_deployments(cluster) == {f"{MODEL}-v1"}


def test_a_rollout_is_promoted_although_its_controller_dies(cluster: Cluster) -> None:
    before = leader()
    with Load().running(cluster) as load:
        start(2)
        until(cluster, 2, Phase.SHIFTING)
        (pod,) = [each for each in cluster.kubelet.pods.values() if each.name == before]
        pod.containers["controller"].signal(signal.SIGSTOP)
        wait_until(lambda: leader() != before, "another leader", cluster.kubelet, 60.0)
        pod.containers["controller"].signal(signal.SIGKILL)
        now = ended(cluster, 2)
    assert now.phase is Phase.PROMOTED, now.reason
    assert load.errors == []
    assert load.answered > 100
    wait_until(lambda: live_deployments(cluster) == {f"{MODEL}-v2"}, "the old release gone", cluster.kubelet)
    numbers = [each.seq for each in rollouts().decisions(MODEL)]
    assert numbers == list(range(1, len(numbers) + 1)), "no decision is doubled or lost"


def test_what_was_asked_at_each_gateway_is_recorded_in_the_store(cluster: Cluster) -> None:
    objects, prefix = open_objects(os.environ["SERIN_STORE"]), f"captures/records/{MODEL}/"

    def recorded_by() -> set[str]:
        parts = [key for key in objects.keys(prefix) if key.endswith(".parquet")]
        return {key.removeprefix(prefix).partition("/")[0] for key in parts}

    wait_until(lambda: len(recorded_by()) == 2, "records of both gateways", cluster.kubelet, 200.0)


def test_a_candidate_whose_pods_die_is_rolled_back_and_no_client_notices(cluster: Cluster) -> None:
    with Load().running(cluster) as load:
        start(3)
        until(cluster, 3, Phase.SHIFTING)
        for pod in cluster.kubelet.pods_with(RELEASES, {"serin.dev/release": f"{MODEL}-v3"}):
            pod.containers["triton"].signal(signal.SIGKILL)
        now = ended(cluster, 3)
    assert now.phase is Phase.ROLLED_BACK, now.reason
    assert load.errors == []
    wait_until(
        lambda: live_deployments(cluster) == {f"{MODEL}-v2"}, "the candidate gone", cluster.kubelet, 60.0
    )


def _serin(*words: str, code: int = 0, key: str | None = None) -> str:
    """A command outside of the cluster. `key`: the access key of the store, one of the docs; None: an owner's."""
    own = {"AWS_ACCESS_KEY_ID": key} if key else {}
    done = serin_process(*words, env={**os.environ, **own}, code=code)
    return done.stdout + done.stderr


def test_a_rollout_waits_for_an_approval_that_ci_cannot_give(cluster: Cluster) -> None:
    def now() -> Rollout | None:
        last = rollouts().last(APPROVED)
        return decision2rollout(last) if last else None

    def waits() -> bool:
        found = now()
        return found is not None and found.hold is Hold.APPROVAL

    objects = open_objects(os.environ["SERIN_STORE"])
    _serin("trust", "policy", "--approval")
    try:
        start(1, APPROVED)
        wait_until(waits, "the question", cluster.kubelet, 400.0)
        for kind in ("approve", "promote", "rollback", "start", "abort"):
            name = f"{APPROVED}:1" if kind in ("rollback", "start") else APPROVED
            assert "AccessDenied" in _serin("rollout", kind, name, code=1, key="ci")
        assert "AccessDenied" in _serin("trust", "policy", "--off", code=1, key="ci")
        assert objects.keys("rollouts/inbox/") == objects.keys("rollouts/approvals/") == []
        assert waits()
        assert not Store.open().aliases(APPROVED).get("live")
        said = _serin("rollout", "approve", APPROVED, "--why", "it was tried", key="approver")
        assert "accepted" in said
        wait_until(
            lambda: (found := now()) and found.phase is Phase.PROMOTED, "its end", cluster.kubelet, 400.0
        )
        assert Store.open().aliases(APPROVED)["live"] == 1
    finally:
        _serin("trust", "policy", "--off")
    _serin("retire", APPROVED, "--yes")
    wait_until(lambda: f"{APPROVED}-v1" not in live_deployments(cluster), "its release gone", cluster.kubelet)


PYTHON = "/opt/serin/bin/python"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
SCRAPE = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
assert b"serin_" in urllib.request.urlopen(asked, timeout=20).read()
"""
TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "stranger": {"gateway": (8443,)},
    "prometheus": {"gateway": (8443, 9464), "triton": (8002,)},
    "gateway": {"triton": (8000, 8001)},
    "controller": {"triton": (8000, 8001)},
    "triton": {},
}  # what each may reach of the ports that are open


def _visitor(name: str) -> dict[str, Any]:
    container = {"name": name, "image": name, "command": ["sleep", "600"]}
    spec = {"containers": [container], "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": name}, "spec": spec}


def test_the_network_lets_through_what_the_policies_say_and_nothing_else(cluster: Cluster) -> None:
    spaces = {"stranger": {}, "prometheus": {"serin.dev/scrapes": "true"}}
    for name, labels in spaces.items():
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        cluster.plane.apply([space])
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_until(lambda at=account: _exists(cluster, at), f"{name}'s account", cluster.kubelet)  # type: ignore[misc]
    cluster.plane.apply([_visitor(name) for name in spaces])

    def pods() -> dict[str, Pod]:
        found = [pod for pod in cluster.kubelet.pods.values() if not pod.ended]
        return {name: pod for pod in found for name in pod.containers if name in TRIED}

    listening = {"gateway": (8443, 9464), "triton": (8000, 8001, 8002)}
    tried = [
        (source, target, port)
        for source in TRIED
        for target, ports in listening.items()
        for port in ports
        if source != target
    ]
    wanted = {each for each in tried if each[2] in TRIED[each[0]].get(each[1], ())}
    seen: list[set[tuple[str, str, int]]] = []

    def settled() -> dict[str, Pod] | None:
        """Returns the pods when what may pass does: those of the last rollout may be on their way out."""
        running = pods()
        if running.keys() != TRIED.keys():
            return None
        seen.append(
            {
                (source, target, port)
                for source, target, port in tried
                if running[source]
                .containers[source]
                .run([PYTHON, "-c", CONNECT, running[target].address, str(port)], 20.0)
            }
        )
        return running if wanted <= seen[-1] else None

    running = wait_until(settled, "what may pass", cluster.kubelet, 300.0)
    assert running is not None
    assert set.union(*seen) == wanted
    place = f"http://{running['gateway'].address}:9464/metrics"
    for token, good in ((METRICS_TOKEN, True), ("another", False)):
        command = [PYTHON, "-c", SCRAPE, place, token]
        assert running["prometheus"].containers["prometheus"].run(command, 60.0) == good


def _exists(cluster: Cluster, path: str) -> bool:
    with cluster.plane.client() as api:
        return api.get(path).status_code == 200


def test_a_drain_takes_one_pod_of_a_part_and_then_waits_for_another_one(cluster: Cluster) -> None:
    """The server knows budgets as policy/v1beta1, with the same fields but one."""
    budgets = [
        each for each in built(MANIFESTS / "overlays" / "cpu") if each["kind"] == "PodDisruptionBudget"
    ]
    for each in budgets:
        each["apiVersion"] = "policy/v1beta1"
        del each["spec"]["unhealthyPodEvictionPolicy"]
    cluster.plane.apply(budgets)
    for namespace, name, labels in (
        ("serin", "gateway", {"app.kubernetes.io/name": "gateway"}),
        (RELEASES, "releases", {"app.kubernetes.io/managed-by": "serin"}),
    ):
        budget = f"/apis/policy/v1beta1/namespaces/{namespace}/poddisruptionbudgets/{name}"
        wait_until(
            lambda at=budget: cluster.plane.call("GET", at).get("status", {}).get("disruptionsAllowed") == 1,  # type: ignore[misc]
            f"{name} with a pod to spare",
            cluster.kubelet,
        )
        pods = cluster.kubelet.pods_with(namespace, labels)
        assert len(pods) == 2
        codes = [_evict(cluster, pod) for pod in pods]
        assert codes == [201, 429]
        wait_until(
            lambda space=namespace, which=labels, old=pods: (  # type: ignore[misc]
                all(pod not in old[:1] for pod in cluster.kubelet.pods_with(space, which))
                and len(cluster.kubelet.pods_with(space, which)) == 2
            ),
            f"another pod of {name}",
            cluster.kubelet,
        )


def _evict(cluster: Cluster, pod: Pod) -> int:
    body = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
    }
    with cluster.plane.client() as api:
        return api.post(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/eviction", json=body).status_code


def test_a_gateway_that_is_replaced_holds_nothing(cluster: Cluster) -> None:
    old = {each.name for each in cluster.kubelet.pods_with("serin", {"app.kubernetes.io/name": "gateway"})}
    gone = min(old)
    cluster.plane.call("DELETE", f"/api/v1/namespaces/serin/pods/{gone}")
    objects = open_objects(os.environ["SERIN_STORE"])

    def replaced() -> bool:
        hosts = {key.split("/")[2] for key in objects.keys("cluster/hosts/")}
        return gone not in hosts and len(hosts) == 2 and len(gateways(cluster)) == 2

    wait_until(replaced, "a new gateway in the place of the old", cluster.kubelet, 120.0)
