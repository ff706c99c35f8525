"""Pipelines as Slurm jobs on two nodes: a real slurmctld, real slurmds, a real Prefect server and Serin's workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import running_slurm
from tests.cluster.slurm_scene import Scene, slurm_scene
from tests.fakes.small_pipeline import small_spec


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("slurm")
    with running_slurm(folder / "c") as cluster, slurm_scene(cluster, folder / "home") as made:
        made.set_pool("cpu", cores=1, memory_gb=2, time_minutes=20)
        made.set_pool("gpu", cores=2, memory_gb=2, gpus=1, time_minutes=20)
        yield made


def test_a_pipeline_runs_as_jobs_on_the_nodes(scene: Scene, tmp_path: Path) -> None:
    run = scene.begin("pipeline/placed", {"spec": small_spec(tmp_path / "a"), "serve": False})
    scene.wait_for(run, "COMPLETED", within_s=400)
    print(scene.log(run))
    print(scene.cluster.command("squeue", "-t", "all"))
    print(scene.cluster.jobs())
