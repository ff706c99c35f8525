"""A small kubelet: it starts the commands of its node's pods as processes on this machine.

Init containers run first; then all containers, restarted by the pod's policy; probes by HTTP, TCP and commands; volumes
of ConfigMaps, Secrets, claims and empty folders; network policies. What it does not do: images and limits.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.cluster.container import Object
from tests.cluster.kubernetes import ControlPlane
from tests.cluster.pod import Pod
from tests.cluster.pod_network import PodNetwork
from tests.kit import waiting
from tests.kit.network_policies import Peer, Way, openings
from tests.kit.waiting import T, until

_LOOK_S = 0.3
Prepared = Callable[[Pod, Mapping[str, Path]], None]
"""Gets a pod and the folders of its volumes by name: a fault of its node."""


class Kubelet:
    def __init__(
        self, plane: ControlPlane, network: PodNetwork, folder: Path, *, node: str = "node-1"
    ) -> None:
        self.plane, self.network, self.folder, self.node = plane, network, folder, node
        self.pods: dict[str, Pod] = {}  # by uid
        self.errors: list[str] = []
        self.prepared: Prepared = lambda _, __: None  # called between a pod's init containers and the others
        self._services: dict[str, list[str]] = {}
        self._policies: list[Object] = []
        self._labels: dict[str, dict[str, str]] = {}  # of namespaces
        self._guards: dict[str, list[str]] = {}  # by network namespace
        self._stop = threading.Event()

    def pod(self, namespace: str, **labels: str) -> Pod:
        """Returns the only running pod with these labels (`_` for `/` and `.` is not translated: pass a dict)."""
        (found,) = self.pods_with(namespace, labels)
        return found

    def pods_with(self, namespace: str, labels: dict[str, str]) -> list[Pod]:
        return [
            pod
            for pod in self.pods.values()
            if pod.namespace == namespace and labels.items() <= pod.labels.items() and not pod.ended
        ]

    def resolve(self, name: str) -> Sequence[str] | None:
        """Returns the ready pods of `<service>.<namespace>.svc`."""
        parts = name.removesuffix(".cluster.local").split(".")
        if len(parts) != 3 or parts[2] != "svc":
            return None
        return self._services.get(f"{parts[1]}/{parts[0]}")

    def guard(self, pod: Pod) -> None:
        """Enforces the policies that were read last at the border of a pod that has an address."""
        rules = self._rules(pod)
        if self._guards.get(pod.space) != rules:
            self.network.guard(pod.space, rules)
            self._guards[pod.space] = rules

    def _rules(self, pod: Pod) -> list[str]:
        others = [each for each in list(self.pods.values()) if each.address and not each.ended]
        rules = []
        ways: tuple[tuple[Way, str, str], ...] = (("ingress", "INPUT", "-s"), ("egress", "OUTPUT", "-d"))
        for way, chain, side in ways:
            given = openings(self._policies, self._peer(pod), way)
            if given is None:
                rules.append(f"-A {chain} -j ACCEPT")
            for each in given or ():
                what = f"-A {chain} -p {each.protocol.lower()}" + (
                    f" --dport {each.port}" if each.port else ""
                )
                fitting = sorted(other.address for other in others if each.fits(self._peer(other)))
                named = [*fitting, *each.ranges]
                ends = [""] if each.peers is None else [f" {side} {address}" for address in named]
                rules += [f"{what}{end} -j ACCEPT" for end in ends]
        return rules

    def _peer(self, pod: Pod) -> Peer:
        about = self._labels.get(pod.namespace, {})
        return Peer(name=pod.name, namespace=pod.namespace, labels=pod.labels, about=about)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._register()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            for pod in self.pods.values():
                pod.kill()
            for pod in self.pods.values():
                pod.join()

    def _register(self) -> None:
        self.plane.call("POST", "/api/v1/nodes", {"kind": "Node", "metadata": {"name": self.node}})
        room = {
            "cpu": "64",
            "memory": "256Gi",
            "pods": "200",
            "ephemeral-storage": "100Gi",
            "nvidia.com/gpu": "4",
        }
        status = {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": "ready"}],
            "addresses": [{"type": "InternalIP", "address": self.network.gateway}],
        }
        merge = "application/merge-patch+json"
        self.plane.call("PATCH", f"/api/v1/nodes/{self.node}/status", {"status": status}, kind=merge)
        self.plane.call("PATCH", f"/api/v1/nodes/{self.node}", {"spec": {"taints": None}}, kind=merge)

    def _run(self) -> None:
        with self.plane.client() as api:
            while not self._stop.is_set():
                try:
                    self._sync(api)
                except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                self._stop.wait(_LOOK_S)

    def _sync(self, api: httpx.Client) -> None:
        selector = {"fieldSelector": f"spec.nodeName={self.node}"}
        policies = api.get("/apis/networking.k8s.io/v1/networkpolicies").raise_for_status().json()["items"]
        spaces = api.get("/api/v1/namespaces").raise_for_status().json()["items"]
        self._labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in spaces}
        self._policies = policies
        found = api.get("/api/v1/pods", params=selector).raise_for_status().json()["items"]
        present = {pod["metadata"]["uid"]: pod for pod in found}
        for uid, pod in present.items():
            if uid not in self.pods and "deletionTimestamp" not in pod["metadata"]:
                self.pods[uid] = Pod(self, pod)
            elif uid not in self.pods:
                self._forget(api, pod)
            elif "deletionTimestamp" in pod["metadata"]:
                self.pods[uid].leave()
        for uid, running in self.pods.items():
            if uid not in present and not running.ended:
                running.kill()
            if running.address and not running.ended:
                self.guard(running)
        endpoints = api.get("/api/v1/endpoints").raise_for_status().json()["items"]
        self._services = {
            f"{e['metadata']['namespace']}/{e['metadata']['name']}": _ready(e) for e in endpoints
        }

    @staticmethod
    def _forget(api: httpx.Client, pod: Object) -> None:
        """Removes a pod that was deleted before it was started."""
        place = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        api.request("DELETE", place, params={"gracePeriodSeconds": "0"})


def _ready(endpoints: Object) -> list[str]:
    return [each["ip"] for subset in endpoints.get("subsets") or () for each in subset.get("addresses") or ()]


def wait_until(check: Callable[[], T], what: str, kubelet: Kubelet, within_s: float = 180.0) -> T:
    """Returns the first true value of `check`; fails when the control plane died or the time is over."""
    plane = waiting.running(*kubelet.plane.processes.values())
    return until(check, what, within_s=within_s, every_s=0.2, alive=plane, said=lambda: kubelet.errors[-3:])
