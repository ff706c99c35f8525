"""A dataset computed by Dask workers on three hosts: one link is slow, one host is cut off, the bytes are the same."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import distributed
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.store.store import Store
from tests.cluster.hosts_cluster import Cluster, three_hosts
from tests.cluster.namespaces import wait_for
from tests.cluster.small_pipeline import SERIN, last_json, run_alone, write_spec, write_table
from tests.unit.serving.bundles import MODEL, publish
from tests.unit.serving.bundles import rows as requests

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded
_DASK = Path(sys.executable).with_name("dask")
_ROWS = 1_500_000


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with three_hosts(tmp_path, monkeypatch) as found:
        yield found


def dask_cluster(cluster: Cluster, stack: ExitStack) -> tuple[str, dict[str, subprocess.Popen[str]]]:
    """A scheduler on host a, one worker on each host; who does not answer for 12 s is lost."""
    network, folder = cluster.network, cluster.folder
    impatient = {
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "15s",
    }
    port = network["a"].free_port()
    address = f"tcp://{network['a'].address}:{port}"
    scheduler = network["a"].popen(
        [_DASK, "scheduler", "--host", network["a"].address, "--port", str(port), "--no-dashboard"],
        env=cluster.environment("a", **impatient),
        log=folder / "scheduler.log",
    )
    workers = {
        name: network[name].popen(
            [_DASK, "worker", address, "--host", network[name].address, "--name", name, "--nthreads", "1",
             "--no-nanny", "--no-dashboard", "--memory-limit", "2GB", "--local-directory", folder / f"dask-{name}"],
            env=cluster.environment(name, **impatient),
            log=folder / f"dask-{name}.log",
        )
        for name in ("a", "b", "c")
    }  # fmt: skip
    for process in (scheduler, *workers.values()):
        stack.callback(process.kill)
    return address, workers


def score_in_bulk(cluster: Cluster, address: str) -> None:
    """Scores by the workers that are left, which fetch the version from the store, and by one process."""
    folder, rows = cluster.folder, cluster.folder / "rows.parquet"
    with cluster.network["store"].inside():
        publish(Store.open(), bias=0.5)
    columns = {name: pa.array(values.reshape(-1)) for name, values in requests(20_000).items()}
    pq.write_table(pa.table(columns), rows, row_group_size=2000)
    command = [*SERIN, "predict", MODEL, rows, "--batch"]
    a, variables = cluster.network["a"], cluster.environment("a")
    a.run([*command, "--scheduler", address, "--out", folder / "by-hosts"], env=variables, within_s=300)
    a.run([*command, "--out", folder / "by-one"], env=variables, within_s=300)
    parts = sorted(path.name for path in (folder / "by-one").iterdir())
    assert len(parts) == 10
    for part in parts:
        assert (folder / "by-hosts" / part).read_bytes() == (folder / "by-one" / part).read_bytes()
    assert [path.name for path in (folder / "home-c").rglob("manifest.json")] == ["manifest.json"]


def row_bytes(dataset: Path) -> dict[str, bytes]:
    """Every file with rows or fitted numbers."""
    files = sorted(path for path in dataset.rglob("*") if path.is_file() and path.name != "dataset.json")
    return {path.relative_to(dataset).as_posix(): path.read_bytes() for path in files}


def test_hosts_compute_the_dataset_of_one_machine_although_one_is_cut_off(cluster: Cluster) -> None:
    folder = cluster.folder
    write_table(folder / "data.parquet", _ROWS)
    (folder / "home-a").mkdir()
    for name in ("b", "c"):  # which have their own disks
        cluster.network[name].run(["mount", "-t", "tmpfs", "none", folder / "home-a"])
    with ExitStack() as stack:
        address, workers = dask_cluster(cluster, stack)
        spec = write_spec(folder, etl={"engine": address})
        scratch = {"SERIN_SCRATCH": str(folder / "scratch")}
        cluster.network["c"].slow(delay_ms=20, loss=0.01)
        client: Any
        with cluster.network["a"].inside():
            client = stack.enter_context(distributed.Client(address, timeout=120, set_as_default=False))
            client.wait_for_workers(3, timeout=180)
        etl = cluster.network["a"].popen(
            [*SERIN, "etl", spec, "--json"], env=cluster.environment("a", **scratch), log=folder / "etl.log"
        )
        busy = f"tcp://{cluster.network['b'].address}"
        wait_for(
            lambda: any(tasks for worker, tasks in client.processing().items() if worker.startswith(busy)),
            within_s=300,
            watching=[etl, *workers.values()],
            every_s=0.02,
        )
        cluster.network["b"].cut()
        assert etl.wait(400) == 0, (folder / "etl.log").read_text()
        score_in_bulk(cluster, address)
        with cluster.network["a"].inside():
            remaining = sorted(info["name"] for info in client.scheduler_info()["workers"].values())
    assert remaining == ["a", "c"]
    with cluster.network["store"].inside():
        editions = Store.open().datasets()
    made = last_json((folder / "etl.log").read_text())
    alone = write_spec(folder, etl={"engine": "process"})
    reference = run_alone(folder, "etl", alone)
    assert made["digest"] == reference["digest"]
    assert row_bytes(Path(made["path"])) == row_bytes(Path(reference["path"]))
    assert editions == [Path(made["path"]).name] == [Path(reference["path"]).name]


def test_workers_that_do_not_see_the_scratch_folder_are_named(cluster: Cluster) -> None:
    folder = cluster.folder
    write_table(folder / "data.parquet", 2000)
    (folder / "scratch").mkdir()
    cluster.network["b"].run(["mount", "-t", "tmpfs", "none", folder / "scratch"])
    with ExitStack() as stack:
        address, _ = dask_cluster(cluster, stack)
        with cluster.network["a"].inside():
            client: Any = stack.enter_context(distributed.Client(address, timeout=120, set_as_default=False))
            client.wait_for_workers(3, timeout=180)
        spec = write_spec(folder, etl={"engine": address})
        refused = cluster.network["a"].run(
            [*SERIN, "etl", spec],
            env=cluster.environment("a", SERIN_SCRATCH=str(folder / "scratch")),
            check=False,
            within_s=300,
        )
    assert refused.returncode == 1
    assert f"tcp://{cluster.network['b'].address}" in refused.stderr
    assert "set SERIN_SCRATCH" in refused.stderr
