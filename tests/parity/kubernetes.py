"""Kubernetes with the objects of deployments/kubernetes: two controllers, two gateways with TLS and keys."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from serin.machine.durable import make_private
from serin.store.store import Store
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, built, running_cluster
from tests.cluster.kubernetes_prefect import prefect_variables, start_prefect
from tests.cluster.test_kubernetes_rollout import PARTS, RELEASES, Access, leader
from tests.fakes.kserve import KServe
from tests.kit.commands import serin_process
from tests.kit.web import Answer, ask
from tests.parity.place import Place


class Kubernetes(Place):
    """Commands run on a machine outside that has SERIN_STORE and the credentials, as the docs say."""

    name = "kubernetes"

    def __init__(self, cluster: Cluster, access: Access, folder: Path) -> None:
        super().__init__(folder)
        self._cluster, self._key, self._secrets = cluster, access.key, access.secrets
        self._tls = ssl.create_default_context(cafile=str(access.ca))
        self.address = cluster.kubelet.network.gateway

    def serin_done(
        self, words: Sequence[str], home: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        env = {**os.environ, "SERIN_HOME": str(home or self.folder / "home"), **variables}
        done = serin_process(*words, env=env, code=None, timeout_s=1800.0)
        return done.returncode, done.stdout, done.stderr

    @property
    def gateways(self) -> list[str]:
        return [f"{address}:8443" for address in self._cluster.kubelet.resolve("gateway.serin.svc") or ()]

    @property
    def store(self) -> Store:
        return Store.open()

    def call(
        self, gateway: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        given = {"authorization": f"Bearer {self._key}", **(headers or {})}
        return ask(gateway, path, body, given, tls=self._tls)

    @contextmanager
    def server(self, model: str, **how: Any) -> Iterator[KServe]:
        """With the policy that lets controllers and gateways reach it, as the docs say."""
        with super().server(model, **how) as made:
            host, _, port = made.address.partition(":")
            policy = yaml.safe_load((MANIFESTS / "servers-elsewhere" / "network-policy.yaml").read_text())
            policy["metadata"]["name"] += f"-{port}"
            to, ports = [{"ipBlock": {"cidr": f"{host}/32"}}], [{"protocol": "TCP", "port": int(port)}]
            policy["spec"]["egress"] = [{"to": to, "ports": ports}]
            self._cluster.plane.apply([policy])
            yield made

    def repositories(self, release: str) -> list[Path]:
        pods = self._cluster.kubelet.pods_with(RELEASES, {"serin.dev/release": release})
        return [self._cluster.kubelet.folder / "pods" / pod.metadata["uid"] for pod in pods]

    def open_port(self, port: int) -> None:
        """As docs/how-to says for receivers and package indexes at other ports than 443."""
        opened = {"policyTypes": ["Egress"], "egress": [{"ports": [{"protocol": "TCP", "port": port}]}]}
        gateways = {"matchLabels": {"app.kubernetes.io/name": "gateway"}}
        for namespace, pods in {"serin": gateways, "serin-stages": {}}.items():
            policy = {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": f"port-{port}", "namespace": namespace},
                "spec": {"podSelector": pods, **opened},
            }
            self._cluster.plane.apply([policy])

    @contextmanager
    def prefect(self) -> Iterator[dict[str, str]]:
        start_prefect(self._cluster, secrets=self._secrets)
        yield prefect_variables(self._cluster)

    def open_again(self) -> None:
        """Its gateways always ask for a key."""


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    folder.chmod(0o755)  # pods have other users
    with running_cluster(folder / "cluster") as cluster:
        os.environ.update(cluster.store)
        os.environ["SERIN_HOME"] = str(folder / "home")
        (folder / "access").mkdir()
        access = Access.create(folder / "access", cluster)
        cluster.add_settings(secrets=access.secrets)
        kinds = ("Deployment", "Service", "ConfigMap")
        parts = built(MANIFESTS / "overlays" / "cpu")
        cluster.plane.apply(
            [each for each in parts if each["metadata"]["name"] in PARTS and each["kind"] in kinds]
        )
        place = Kubernetes(cluster, access, folder)
        make_private(folder / "home")
        shutil.copy(folder / "access" / "keys.json", folder / "home" / "keys.json")
        wait_until(lambda: len(place.gateways) == 2, "two gateways", cluster.kubelet, 400.0)
        wait_until(lambda: leader() != "", "a leading controller", cluster.kubelet, 400.0)
        place.serin("keys", "share")
        yield place
