"""Training on three hosts: one has a slow link, the first is cut off, and the weights are those of one machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.store.checkpoints import checkpoint_names
from serin.store.objects import open_objects
from serin.store.store import Store
from tests.cluster.hosts_cluster import Cluster, three_hosts
from tests.cluster.namespaces import wait_for
from tests.cluster.small_pipeline import SERIN, host_environment, last_json, write_spec, write_table

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded
_TRAINING = {"epochs": 3, "batch_rows": 120, "checkpoint_every_steps": 10, "learning_rate": 0.003}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with three_hosts(tmp_path, monkeypatch) as found:
        yield found


def weights(result: Path) -> bytes:
    return (result / "weights.safetensors").read_bytes()


def logged(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()


def test_a_training_that_loses_its_first_host_ends_with_the_weights_of_one_machine(cluster: Cluster) -> None:
    folder = cluster.folder
    write_table(folder / "data.parquet", 5000)
    spec = write_spec(folder, training=_TRAINING)
    cluster.network["b"].run([*SERIN, "etl", spec], env=cluster.environment("b"), within_s=120)
    cluster.network["c"].slow(delay_ms=20, loss=0.01)
    training = {
        name: cluster.network[name].popen(
            [*SERIN, "train", spec, "--machines", "3", "--json"],
            env=cluster.environment(name),
            log=folder / f"{name}.log",
        )
        for name in ("a", "b", "c")
    }
    with cluster.network["store"].inside():
        store, objects = Store.open(), open_objects(cluster.store["SERIN_STORE"])
        wait_for(
            lambda: any(name.endswith("step-00000010") for name in checkpoint_names(store, "train-")),
            within_s=400,
            watching=list(training.values()),
        )
        cluster.network["a"].cut()
        for name in ("b", "c"):
            assert training[name].wait(400) == 0, logged(folder, name)
        cluster.network["a"].restore()
        assert training["a"].wait(120) == 0, logged(folder, "a")
        rounds = objects.keys("trainings/")
    results = {name: Path(last_json(logged(folder, name))["path"]) for name in training}
    alone = write_spec(folder, training={**_TRAINING, "processes": 3})
    reference = subprocess.run(
        [*SERIN, "train", alone, "--json"],
        env=host_environment(folder / "home-alone", {}),
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    expected = weights(Path(last_json(reference.stdout)["path"]))
    assert {name: weights(path) == expected for name, path in results.items()} == dict.fromkeys("abc", True)
    assert len([key for key in rounds if "/rounds/" in key]) == 2
    assert len([key for key in rounds if "/ends/" in key]) == 1
