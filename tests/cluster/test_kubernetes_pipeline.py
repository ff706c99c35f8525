"""A pipeline on Kubernetes: Prefect's server and workers of the manifests, each stage a Job.

Prefect has one replica on SQLite here: Postgres and Valkey come as images, which this machine cannot pull.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from serin.store.store import Store
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import (
    MANIFESTS,
    NOT_IN_THE_SERVER,
    Cluster,
    built,
    cluster_with_home,
)
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

PARTS = {
    "prefect",
    "prefect-server",
    "prefect-api",
    "worker-cpu",
    "worker-gpu",
    "serin-pools",
    "serin-shared",
}
HOME = Path("/var/lib/serin")  # of stages, on the shared volume
pytestmark = pytest.mark.timeout(2400)  # a busy machine takes its time; each wait has its own limit
PASSWORD = secrets.token_urlsafe(12)


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory) as running:
        start_prefect(running)
        yield running


def start_prefect(running: Cluster, secrets: Mapping[str, Mapping[str, str]] = {}) -> None:
    """Prefect's server and workers in a cluster. `secrets`: of its other parts."""
    passwords = {
        "serin-prefect": {"auth-string": f"admin:{PASSWORD}"},
        "serin-postgres": {"url": "sqlite+aiosqlite:////tmp/prefect.db"},
    }
    running.add_settings(secrets={**secrets, **passwords})
    _add_volume(running, running.kubelet.folder.parent / "shared")
    known = [
        each for each in built(MANIFESTS / "overlays" / "cpu") if each["apiVersion"] not in NOT_IN_THE_SERVER
    ]
    wanted = [each for each in known if each["metadata"]["name"] in PARTS]
    workers = [each for each in wanted if each["metadata"]["name"].startswith("worker-")]
    running.plane.apply(_on_sqlite([each for each in wanted if each not in workers]))
    wait_until(lambda: prefect(running), "Prefect's server", running.kubelet, 1200.0)
    running.plane.apply(workers)


def prefect(cluster: Cluster) -> str | None:
    found = cluster.kubelet.resolve("prefect.serin.svc")
    return f"http://{found[0]}:4200/api" if found else None


def prefect_variables(cluster: Cluster) -> dict[str, str]:
    own = {"PREFECT_API_URL": prefect(cluster) or "", "PREFECT_API_AUTH_STRING": f"admin:{PASSWORD}"}
    return {**own, "PREFECT_HOME": str(cluster.kubelet.folder / "prefect"), "DO_NOT_TRACK": "1"}


def deploy(cluster: Cluster) -> None:
    """Makes the deployments by the Job of the manifests."""
    cluster.plane.apply([each for each in built(MANIFESTS / "overlays" / "cpu") if each["kind"] == "Job"])

    def deployed() -> bool:
        found = cluster.plane.call("GET", "/apis/batch/v1/namespaces/serin/jobs/deploy")
        return bool(found["status"].get("succeeded"))

    wait_until(deployed, "the deployments", cluster.kubelet, 1200.0)


def _jobs(cluster: Cluster) -> list[dict[str, Any]]:
    """The Jobs of the pipeline and its stages: on a slow machine, scheduled flows run beside them."""
    found = cluster.plane.call("GET", "/apis/batch/v1/namespaces/serin-stages/jobs")["items"]
    return [job for job in found if job["metadata"]["labels"].get("prefect.io/deployment-name") == "placed"]


def test_each_stage_of_a_pipeline_is_a_job(cluster: Cluster) -> None:
    deploy(cluster)
    data = cluster.kubelet.folder.parent / "shared" / "data"
    spec = small_spec(data)
    spec["data"]["tables"] = {"parcels": str(HOME / "data" / "parcels.parquet")}
    write_spec(data, spec)
    command = ["deployment", "run", "pipeline/placed", "--param", f"spec={HOME / 'data' / 'spec.yaml'}"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *command, "--param", "serve=false", "--watch"],
        env={**os.environ, **prefect_variables(cluster)}, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    logs = [path.read_text()[-3000:] for path in (cluster.kubelet.folder / "logs").glob("serin-stages.*")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    # A run ends before its pod does, and its Job is done when the controller manager has seen that.
    wait_until(
        lambda: all(job["status"].get("succeeded") == 1 for job in _jobs(cluster)),
        "the Jobs",
        cluster.kubelet,
        120.0,
    )
    jobs = _jobs(cluster)
    assert len(jobs) == 4, [job["metadata"]["name"] for job in jobs]  # the pipeline, ETL, training, export
    assert PASSWORD not in json.dumps(jobs), "the password is read from a secret"
    assert Store.open().versions(NAME) == [1]
