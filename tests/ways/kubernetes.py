"""Kubernetes: Prefect's server and workers of the manifests; each run and each stage is a Job, whose pod has another
user than the sender."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.prefect.rest_api import Api
from tests.cluster.kubernetes_cluster import running_cluster
from tests.cluster.kubernetes_prefect import HOME, LOGIN, prefect, shared, start_prefect
from tests.ways.place import Elsewhere, wait_for_deployments
from tests.ways.projects import write_index


class Kubernetes(Elsewhere):
    name = "kubernetes"
    placed = True


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """Pods find the package index on the shared volume."""
    folder.chmod(0o755)  # pods have other users
    desk = folder / "desk"
    desk.mkdir(mode=0o700)  # which they may not enter
    with running_cluster(folder / "cluster") as cluster:
        os.environ.update(cluster.store)
        write_index(shared(cluster) / "index")
        start_prefect(cluster, {"UV_DEFAULT_INDEX": (HOME / "index").as_uri()})
        index = (shared(cluster) / "index").as_uri()
        api = Api(prefect(cluster) or "", LOGIN)
        place = Kubernetes(desk, api, {**cluster.store, "UV_DEFAULT_INDEX": index})
        wait_for_deployments(place)
        place.stop_schedules()
        yield place
