"""A pipeline on Kubernetes: Prefect's server and workers of the manifests, each stage a Job."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from serin.store.store import Store
from tests.cluster.kubelet import wait_until
from tests.cluster.kubernetes_cluster import Cluster, cluster_with_home
from tests.cluster.kubernetes_prefect import HOME, LOGIN, prefect_variables, shared, start_prefect
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

pytestmark = pytest.mark.timeout(2400)  # a busy machine takes its time; each wait has its own limit


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory) as running:
        start_prefect(running)
        yield running


def _jobs(cluster: Cluster) -> list[dict[str, Any]]:
    """The Jobs of the pipeline and its stages: on a slow machine, scheduled flows run beside them."""
    found = cluster.plane.call("GET", "/apis/batch/v1/namespaces/serin-stages/jobs")["items"]
    return [job for job in found if job["metadata"]["labels"].get("prefect.io/deployment-name") == "placed"]


def _run(cluster: Cluster, priority: str, **parameters: str) -> None:
    """Runs a small pipeline with each stage placed, to its end."""
    data = shared(cluster) / "data"
    spec = {**small_spec(data), "priority": priority}
    spec["data"]["tables"] = {"parcels": str(HOME / "data" / "parcels.parquet")}
    write_spec(data, spec)
    given = {"spec": str(HOME / "data" / "spec.yaml"), "serve": "false", **parameters}
    words = [word for name, value in given.items() for word in ("--param", f"{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", "pipeline/placed", *words, "--watch"],
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


def _classes(cluster: Cluster) -> dict[str, tuple[str | None, int]]:
    """Of each Job's pod, as the API server made it: its class, and the number that the scheduler orders by."""
    found = cluster.plane.call("GET", "/api/v1/namespaces/serin-stages/pods")["items"]
    own = {job["metadata"]["name"] for job in _jobs(cluster)}
    pods = {pod["metadata"]["labels"]["job-name"]: pod["spec"] for pod in found}
    return {name: (pods[name].get("priorityClassName"), pods[name]["priority"]) for name in own}


def test_each_stage_of_a_pipeline_is_a_job_with_the_priority_of_its_spec(cluster: Cluster) -> None:
    _run(cluster, "urgent")
    jobs = _jobs(cluster)
    assert len(jobs) == 4, [job["metadata"]["name"] for job in jobs]  # the pipeline, ETL, training, export
    assert LOGIN not in json.dumps(jobs), "the password is read from a secret"
    assert Store.open().versions(NAME) == [1]
    before = _classes(cluster)
    parent, stages = (None, 0), [("serin-urgent", 1000)] * 3
    assert sorted(before.values(), key=str) == sorted([parent, *stages], key=str)
    _run(cluster, "idle", fresh='["etl"]')  # the others find what they made
    after = {name: found for name, found in _classes(cluster).items() if name not in before}
    assert sorted(after.values(), key=str) == sorted([parent, ("serin-idle", -10)], key=str)
