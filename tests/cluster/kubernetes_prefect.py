"""Prefect's server and workers of the manifests in a cluster, with Serin's deployments.

Prefect has one replica on SQLite here: Postgres and Valkey come as images, which this machine cannot pull.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import MANIFESTS, NOT_IN_THE_SERVER, Cluster, built

HOME = Path("/var/lib/serin")  # of stages, on the shared volume
LOGIN = f"admin:{token_urlsafe(12)}"
_PARTS = {
    "prefect",
    "prefect-server",
    "prefect-api",
    "worker-cpu",
    "worker-gpu",
    "serin-pools",
    "serin-shared",
}
_START_S = 1200.0


def start_prefect(
    cluster: Cluster, settings: Mapping[str, str] = {}, secrets: Mapping[str, Mapping[str, str]] = {}
) -> None:
    """Starts the server, the workers and the Job that makes the deployments. `settings`: more of them for all pods.
    `secrets`: those of its other parts."""
    logins = {
        "serin-prefect": {"auth-string": LOGIN},
        "serin-postgres": {"url": "sqlite+aiosqlite:////tmp/prefect.db"},
    }
    cluster.add_settings(secrets={**secrets, **logins}, settings=settings)
    _add_volume(cluster, shared(cluster))
    parts = built(MANIFESTS / "overlays" / "cpu")
    known = [each for each in parts if each["apiVersion"] not in NOT_IN_THE_SERVER]
    wanted = [each for each in known if each["metadata"]["name"] in _PARTS]
    workers = [each for each in wanted if each["metadata"]["name"].startswith("worker-")]
    cluster.plane.apply(_on_sqlite([each for each in wanted if each not in workers]))
    wait_until(lambda: prefect(cluster), "Prefect's server", cluster.kubelet, _START_S)
    cluster.plane.apply(workers)
    cluster.plane.apply([each for each in parts if each["kind"] == "Job"])
    wait_until(lambda: _deployed(cluster), "the deployments", cluster.kubelet, _START_S)


def prefect(cluster: Cluster) -> str | None:
    """The URL of its API; None before it is ready."""
    found = cluster.kubelet.resolve("prefect.serin.svc")
    return f"http://{found[0]}:4200/api" if found else None


def prefect_variables(cluster: Cluster) -> dict[str, str]:
    """Those of a person who uses it."""
    own = {"PREFECT_API_URL": prefect(cluster) or "", "PREFECT_API_AUTH_STRING": LOGIN}
    return {**own, "PREFECT_HOME": str(cluster.kubelet.folder / "prefect"), "DO_NOT_TRACK": "1"}


def shared(cluster: Cluster) -> Path:
    """The folder of the shared volume, on this machine."""
    return cluster.kubelet.folder.parent / "shared"


def _deployed(cluster: Cluster) -> bool:
    found = cluster.plane.call("GET", "/apis/batch/v1/namespaces/serin/jobs/deploy")
    return bool(found["status"].get("succeeded"))


def _on_sqlite(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for part in parts:
        if part["metadata"]["name"] == "prefect-server":
            part["data"] = {
                key: value
                for key, value in part["data"].items()
                if "redis" not in value and "REDIS" not in key
            }
        if part["kind"] == "StatefulSet":
            part["spec"]["replicas"] = 1
            (api,) = part["spec"]["template"]["spec"]["containers"]
            api["command"].remove("--no-services")
            for container in (api, *part["spec"]["template"]["spec"]["initContainers"]):
                container["env"] = [
                    each for each in container["env"] if "serin-valkey" not in json.dumps(each)
                ]
    return parts


def _add_volume(cluster: Cluster, folder: Path) -> None:
    for path in (folder, folder / "data"):
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    spec = {
        "capacity": {"storage": "20Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": "serin-stages", "name": "serin-shared"},
    }
    cluster.plane.apply(
        [{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "shared"}, "spec": spec}]
    )
