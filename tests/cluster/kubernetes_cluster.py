"""A whole cluster for a test: control plane, pod network, test kubelet and an object store that pods reach."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client

from serin.cluster.kubernetes.fleet import Namespace
from serin.store.artifacts import Endpoint
from tests.cluster.documented_rights import URL
from tests.cluster.kubelet import Kubelet
from tests.cluster.kubernetes import ControlPlane, control_plane
from tests.cluster.part import need
from tests.cluster.parts.kubernetes import binaries
from tests.cluster.pod_network import PodNetwork
from tests.cluster.seaweedfs import running_seaweedfs

MANIFESTS = Path(__file__).resolve().parents[2] / "deployments" / "kubernetes"
NOT_IN_THE_SERVER = {"policy/v1"}  # API server 1.20 has policy/v1beta1: these are checked by schema alone
NAMESPACES = ("serin", "serin-stages", "serin-releases")
_PREFIX = "198.18.60"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    plane: ControlPlane
    kubelet: Kubelet
    store: Mapping[str, str]  # variables

    def reach(self, endpoint: Endpoint) -> Endpoint:
        """Returns the address of a ready pod of a Service: the test itself has no name server."""

        def of(place: str) -> str:
            host, _, port = place.rpartition(":")
            found = self.kubelet.resolve(host)
            return f"{found[0] if found else '127.0.0.254'}:{port}"

        return Endpoint(http=of(endpoint.http), grpc=of(endpoint.grpc))

    def add_settings(
        self, *, secrets: Mapping[str, Mapping[str, str]] = {}, settings: Mapping[str, str] = {}
    ) -> None:
        """Makes what a user makes: the secrets; and the settings for this store in all namespaces, with `settings`
        added."""
        hidden = {key: value for key, value in self.store.items() if key.startswith("AWS_") and "KEY" in key}
        plain = {key: value for key, value in self.store.items() if key not in hidden}
        documents: list[dict[str, Any]] = []
        for namespace in NAMESPACES:
            data = {**_settings(), **plain, **settings}
            documents.append(_object("ConfigMap", "serin-settings", namespace, data=data))
            for name, hides in {"serin-store": hidden, **secrets}.items():
                documents.append(_object("Secret", name, namespace, stringData=dict(hides)))
        self.plane.apply(documents)


def _object(kind: str, name: str, namespace: str, **content: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}, **content}


def _settings() -> dict[str, str]:
    lines = (MANIFESTS / "base" / "settings.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {key: value for key, value in found.items() if value}


def built(overlay: Path) -> list[dict[str, Any]]:
    """Returns what kustomize makes of an overlay."""
    need("kubernetes")
    command = [str(binaries() / "kustomize"), "build", "--load-restrictor=LoadRestrictionsNone", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def controllers_namespace(plane: ControlPlane, name: str) -> Namespace:
    """Returns a namespace as the controller's account sees it."""
    settings = client.Configuration()
    settings.host, settings.ssl_ca_cert = plane.url, str(plane.folder / "tls.crt")
    settings.api_key = {"authorization": plane.token("serin", "controller")}
    settings.api_key_prefix = {"authorization": "Bearer"}
    return Namespace(name, settings=settings)


@contextlib.contextmanager
def running_cluster(folder: Path, *, rights: Mapping[str, Sequence[str]] = {}) -> Iterator[Cluster]:
    """Starts everything; the namespaces, accounts, rights and classes of the manifests are there, their pods are not.
    `rights`: further access keys of the store, and what each may do at the URL that the docs name."""
    need("kubernetes")
    network = PodNetwork(_PREFIX, "kube")
    kubelets: list[Kubelet] = []

    def resolve(name: str) -> Any:
        return kubelets[0].resolve(name) if kubelets else None

    with (
        network.up(resolve),
        running_seaweedfs(folder / "weed", address=network.gateway, others=rights) as store,
        control_plane(folder / "plane", address=network.gateway) as plane,
    ):
        kubelet = Kubelet(plane, network, folder / "node")
        kubelets.append(kubelet)
        kinds = {"Namespace", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "PriorityClass"}
        found = [each for each in built(MANIFESTS / "overlays" / "cpu") if each["kind"] in kinds]
        _open_ports(found, {443: _port(store["AWS_ENDPOINT_URL"]), 6443: plane.port})
        plane.apply(found)
        if rights:
            store["SERIN_STORE"] = URL
        with kubelet.running():
            yield Cluster(plane=plane, kubelet=kubelet, store=store)


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _open_ports(found: list[dict[str, Any]], others: Mapping[int, int]) -> None:
    """Adds this cluster's ports of the store and the API server to the policies, as an overlay does."""
    for policy in found:
        for rule in policy["spec"].get("egress", ()) if policy["kind"] == "NetworkPolicy" else ():
            usual = [each["port"] for each in rule["ports"]]
            rule["ports"] += [{"protocol": "TCP", "port": others[port]} for port in usual if port in others]


@contextlib.contextmanager
def cluster_with_home(
    folders: pytest.TempPathFactory, *, rights: Mapping[str, Sequence[str]] = {}
) -> Iterator[Cluster]:
    """A running cluster, whose store and a new home are those of this process."""
    with (
        running_cluster(folders.mktemp("cluster"), rights=rights) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in running.store.items():
            patch.setenv(name, value)
        patch.setenv("SERIN_HOME", str(folders.mktemp("home")))
        yield running
