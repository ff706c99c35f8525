"""ETL by Dask workers that are Slurm jobs: the example's cluster, on a real Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import BRIDGE, end, running_slurm, wait_until
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.kit.commands import serin_process

pytestmark = pytest.mark.timeout(3600)  # a busy machine; waits are bounded
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "dask_cluster.py"


def test_the_dataset_of_slurm_nodes_is_that_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue", reason="the extra `slurm` is not installed")
    folder, log = tmp_path / "dask", tmp_path / "dask.log"
    with running_slurm(tmp_path / "c") as cluster:
        with log.open("wb") as output:
            dask = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), "--least=2", "--most=2", "--cores=1", "--memory-gb=5",
                 f"--interface={BRIDGE}", "--worker-interface=eth0"],
                env={**os.environ, **cluster.environment}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            wait_until((folder / "environment").exists, "the scheduler", log.read_text, within_s=600)
            given = dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines())
            assert given["SERIN_DASK"].startswith(f"tls://{cluster.address}:")
            assert {
                path.stat().st_mode & 0o077 for path in (folder, folder / "key.pem", folder / "environment")
            } == {0}
            wait_until(lambda: _running(cluster.jobs()) == {"sn1", "sn2"}, "a worker on each node", log.read_text,
                       within_s=600)  # fmt: skip
            many = _etl(tmp_path / "many", "dask", given)
            one = _etl(tmp_path / "one", "process", {})
        finally:
            end(dask)
        wait_until(lambda: not _running(cluster.jobs()), "the workers end with their cluster", log.read_text)
    assert many["digest"] == one["digest"]
    assert many["rows"] == one["rows"]


def _running(jobs: list[dict[str, str]]) -> set[str]:
    return {
        job["NodeList"] for job in jobs if job["JobState"] == "RUNNING" and job["JobName"] == "serin-dask"
    }


def _etl(folder: Path, engine: str, given: dict[str, str]) -> dict[str, Any]:
    spec = write_spec(folder, small_spec(folder, etl={"engine": engine}))
    variables = {**os.environ, "SERIN_HOME": str(folder / "home"), **given}
    done = serin_process("etl", str(spec), "--json", env=variables)
    if given:
        assert given["SERIN_DASK"] in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
