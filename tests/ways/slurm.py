"""Slurm: the pools `cpu` and `gpu` submit jobs to two nodes, which see the jobs' home and not the sender's desk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.seaweedfs import running_seaweedfs
from tests.cluster.slurm import NODES, running_slurm
from tests.cluster.test_slurm import slurm_scene
from tests.ways.place import Elsewhere, wait_for_deployments
from tests.ways.projects import write_index


class Slurm(Elsewhere):
    name = "slurm"
    placed = True


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    index, desk = folder / "index", folder / "desk"
    write_index(index)
    desk.mkdir()
    with (
        running_slurm(folder / "c") as cluster,
        running_seaweedfs(folder / "s3", address=cluster.address) as store,
    ):
        os.environ.update(store)
        streams = [f"PREFECT_SERVER_LOGS_STREAM_{each}_ENABLED" for each in ("OUT", "PUBLISHING")]
        variables = {**store, "UV_DEFAULT_INDEX": index.as_uri(), **dict.fromkeys(streams, "true")}
        cluster.hide(desk)
        with slurm_scene(cluster, folder / "home", **variables) as scene:
            scene.set_pool("cpu", cores=1, memory_gb=2, time_minutes=20, options=[f"--nodelist={NODES[0]}"])
            scene.set_pool("gpu", cores=2, memory_gb=2, gpus=1, time_minutes=20)
            place = Slurm(desk, scene.api, variables)
            wait_for_deployments(place)
            place.stop_schedules()
            yield place
