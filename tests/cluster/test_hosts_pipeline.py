"""A pipeline and a training on several hosts: one is slow, one is cut off, the result is that of one machine."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serin.cluster.host_list import read_hosts
from serin.store.checkpoints import checkpoint_names
from serin.store.open import open_objects
from serin.store.store import Store
from tests.cluster.hosts_cluster import LOGIN, Cluster, start_prefect, three_hosts
from tests.cluster.namespaces import end, wait_for
from tests.cluster.small_pipeline import SERIN, last_json, run_alone, write_spec, write_table

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with three_hosts(tmp_path, monkeypatch) as found:
        yield found


class Pipelines:
    """A Prefect server on host a, and commands on hosts that see only their own home, all at the same path."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder
        a = cluster.network["a"]
        self.url = f"http://{a.address}:{a.free_port()}/api"
        self.home = self.folder / "home"
        self.home.mkdir()
        for name in ("a", "b", "c"):
            own = self.folder / f"home-{name}"
            own.mkdir()
            cluster.network[name].run(["mount", "--bind", own, self.home])
        server = self.environment(PREFECT_HOME=str(self.folder / "prefect"))
        self.server = start_prefect(a, self.url, server, log=self.folder / "prefect.log")

    def environment(self, **more: str) -> dict[str, str]:
        prefect = {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": LOGIN}
        return self.cluster.environment("a", SERIN_HOME=str(self.home), **prefect, **more)

    def start(self, host: str, *command: str) -> subprocess.Popen[str]:
        log = self.folder / f"{host}-{command[0]}.log"
        return self.cluster.network[host].popen([*SERIN, *command], env=self.environment(), log=log)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the server's answer to a GET, or to a POST of `body`."""
        with self.cluster.network["a"].inside():
            method, login = "GET" if body is None else "POST", tuple(LOGIN.split(":"))
            url = f"{self.url}{path}"
            return httpx.request(method, url, json=body, auth=login, timeout=30).json()

    def runs(self, flow: str) -> list[str]:
        """The states of a flow's runs."""
        return sorted(run["state_type"] for run in self._runs(flow))

    def given_up(self, flow: str) -> list[list[str]]:
        """For each run of a flow that was marked as crashed, whatever it reported afterwards: the reasons, the earliest
        first."""
        states = [self.ask(f"/flow_run_states/?flow_run_id={run['id']}") for run in self._runs(flow)]
        reasons = [[state["message"] for state in own if state["type"] == "CRASHED"] for own in states]
        return [own for own in reasons if own]

    def _runs(self, flow: str) -> list[dict[str, Any]]:
        return self.ask("/flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})


def test_a_stage_whose_host_is_cut_off_is_done_by_another_and_one_version_is_published(
    cluster: Cluster,
) -> None:
    folder = cluster.folder
    write_table(folder / "data.parquet", 3000)
    spec = write_spec(folder, training={"epochs": 20, "batch_rows": 60})
    pipelines = Pipelines(cluster)
    cluster.network["a"].run([*SERIN, "deploy"], env=pipelines.environment(), within_s=400)
    workers = [pipelines.start("a", "worker", "cpu"), pipelines.start("b", "worker", "gpu")]
    run = pipelines.start("a", "run", str(spec), "--placed", "--no-serve")

    def reported() -> dict[str, Any]:
        with cluster.network["store"].inside():
            return {entry.host: entry for entry in read_hosts()}

    wait_for(
        lambda: "b" in (found := reported()) and any(worker.runs for worker in found["b"].workers),
        within_s=400,
        watching=[run, *workers],
        what="the training on host b",
    )
    cluster.network["b"].cut()
    workers.append(pipelines.start("c", "worker", "gpu"))
    wait_for(lambda: reported()["b"].silent, within_s=120, watching=[run])
    listed = cluster.network["a"].run([*SERIN, "hosts", "list", "--json"], env=pipelines.environment())
    silent = {entry["host"]: entry["silent"] for entry in json.loads(listed.stdout)}
    assert silent | {"c": False} == {"a": False, "b": True, "c": False}
    assert run.wait(800) == 0, (folder / "a-run.log").read_text()
    cluster.network["b"].restore()
    wait_for(
        lambda: not reported()["b"].silent and not any(worker.runs for worker in reported()["b"].workers),
        within_s=300,
        watching=workers,
        what="host b ends the run that was given up",
    )
    # Host b may have finished the training that was given up: Prefect then takes its report for the run's last state.
    # A training that reported itself before its worker ended it has crashed twice.
    assert pipelines.runs("train") in (["COMPLETED", "CRASHED"], ["COMPLETED", "COMPLETED"])
    (reasons,) = pipelines.given_up("train")
    assert "silent" in reasons[0]
    assert len(reasons) <= 2
    assert pipelines.runs("etl") == pipelines.runs("export") == pipelines.runs("pipeline") == ["COMPLETED"]
    with cluster.network["store"].inside():
        store = Store.open()
        assert (store.models(), store.versions("parcels")) == (["parcels"], [1])
    for worker in workers:
        end(worker)
    with cluster.network["store"].inside():
        assert read_hosts() == []  # who was stopped is not silent


_TRAINING = {"epochs": 3, "batch_rows": 120, "checkpoint_every_steps": 10, "learning_rate": 0.003}


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
    expected = weights(Path(run_alone(folder, "train", alone)["path"]))
    assert {name: weights(path) == expected for name, path in results.items()} == dict.fromkeys("abc", True)
    assert len([key for key in rounds if "/rounds/" in key]) == 2
    assert len([key for key in rounds if "/ends/" in key]) == 1
