"""Runs that are sent from hosts which share nothing with the worker but the Prefect server and the store."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serin.formats.bundle import read_manifest
from serin.store.file_systems import file_system
from serin.store.store import Store
from tests.cluster.hosts_cluster import Cluster, three_hosts
from tests.cluster.namespaces import end, wait_for
from tests.cluster.small_pipeline import PREFECT, SERIN
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import NAME, small_spec

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded
_LOGIN = "serin:only-for-this-test"
_CI = Path(__file__).parents[2] / "examples" / "ci"


class Senders:
    """A Prefect server and workers on host a; b and c send runs. Each host sees its own folder alone."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder
        a = cluster.network["a"]
        self.url = f"http://{a.address}:{a.free_port()}/api"
        self.disks = {name: self.folder / f"disk-{name}" for name in ("a", "b", "c")}
        for disk in self.disks.values():
            disk.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def hide_disks(self) -> None:
        """From now on no host sees the folders of the others."""
        for name in self.disks:
            for other in self.disks.values():
                if other != self.disks[name]:
                    self.cluster.network[name].run(["mount", "-t", "tmpfs", "none", other])

    def start(self) -> None:
        server = {
            "PREFECT_HOME": str(self.disks["a"] / "prefect"),
            "PREFECT_SERVER_API_AUTH_STRING": _LOGIN,
            "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",  # to `prefect deployment run --watch`
            "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        }
        host, _, port = self.url.removeprefix("http://").removesuffix("/api").partition(":")
        command = [*PREFECT, "server", "start", "--host", host, "--port", port]
        self._keep(command, "prefect", **server)
        wait_for(self._answers, within_s=300, watching=self.processes)
        self.serin("a", "deploy")
        for pool in ("cpu", "gpu"):
            self._keep([*SERIN, "worker", pool], f"worker-{pool}")

    def _keep(self, command: list[str], name: str, **more: str) -> None:
        log = self.disks["a"] / f"{name}.log"
        environment = self.environment("a", **more)
        self.processes.append(self.cluster.network["a"].popen(command, env=environment, log=log))

    def environment(self, host: str, **more: str) -> dict[str, str]:
        disk = self.disks[host]
        named = {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": _LOGIN, "HOME": str(disk)}
        own = {
            "SERIN_HOME": str(disk / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return self.cluster.environment(host, **named, **own, **more)

    def run(self, host: str, *command: str | Path, code: int = 0, **more: str) -> str:
        """What a command says on a host, in the folder that the host alone sees."""
        project = self.disks[host] / "project"
        done = self.cluster.network[host].run(
            command,
            env=self.environment(host, PYTHONPATH=str(project), **more),
            cwd=self.disks[host],
            within_s=600,
            check=False,
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def serin(self, host: str, *words: str | Path, code: int = 0, **more: str) -> str:
        return self.run(host, *SERIN, *words, code=code, **more)

    def write(self, host: str, name: str, text: str) -> None:
        script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        self.run(host, sys.executable, "-c", script, name, text)

    def deployment(self, spec: object, *, name: str = "inline", code: int = 0) -> str:
        """As Prefect's own command starts a run, on host c."""
        given = json.dumps({"spec": spec, "serve": False})
        said = self.run(
            "c", *PREFECT, "deployment", "run", f"pipeline/{name}", "--watch", "--params", given, code=code
        )
        return " ".join(said.split())

    def _answers(self) -> bool:
        try:
            with self.cluster.network["a"].inside():
                return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture
def senders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Senders]:
    with three_hosts(tmp_path, monkeypatch) as cluster:
        made = Senders(cluster)
        for host in ("b", "c"):
            write_project(made.disks[host] / "project")
        made.hide_disks()
        made.start()
        yield made
        for process in reversed(made.processes):
            end(process)


def test_a_run_is_sent_by_content_and_every_form_of_a_spec_works_from_a_host_without_the_disk(
    senders: Senders,
) -> None:
    said = senders.run("c", _CI / "train", "project/model/spec.yaml", "report.md")
    assert "sent package" in said
    assert f"{NAME} version 1 is published" in said
    report = senders.run("c", "cat", "report.md")
    assert f"## Completed: {NAME}" in report
    again = senders.serin(
        "b", "run", "project/model/spec.yaml", "--no-serve"
    )  # the same content, from another host
    assert "sent package" not in again
    with senders.cluster.network["store"].inside():
        store = Store.open()
        assert (len(store.datasets()), store.versions(NAME)) == (1, [1])
        package = read_manifest(Path(store.bundle(NAME, 1).path)).lineage["package"]

    _runs_are_shown_and_come_back(senders, f"package:{package}")
    _every_form_works(senders, f"package:{package}")
    _failures_say_why(senders)


def _runs_are_shown_and_come_back(senders: Senders, reference: str) -> None:
    run = json.loads(senders.serin("b", "runs", "list", "--json"))[0]["name"]
    shown = senders.serin("c", "runs", "show", run)
    assert f"code         {reference}" in shown
    senders.serin("c", "runs", "fetch", run, "--to", "back")
    assert "def width" in senders.run("c", "cat", "back/layers.py")
    assert "sent package" not in senders.serin("c", "run", reference, "--no-serve")


def _every_form_works(senders: Senders, reference: str) -> None:
    pushed = json.loads(senders.serin("c", "tables", "push", "project/model", "--json"))
    assert not json.loads(senders.serin("b", "tables", "push", "project/model", "--json"))["sent"]
    spec = small_spec(senders.folder / "unused", rows=10, model={"kind": "xgboost", "rounds": 5}, training={})
    spec["name"] = "plain"
    spec["data"]["tables"] = {"parcels": pushed["tables"]["parcels.parquet"]}
    url = f"{senders.cluster.store['SERIN_STORE']}/specs/plain.yaml"
    with senders.cluster.network["store"].inside():
        system, path = file_system(url)
        system.pipe_file(path, yaml.safe_dump(spec).encode())
    senders.write("a", "plain.yaml", yaml.safe_dump(spec))
    for form in (url, spec, str(senders.disks["a"] / "plain.yaml"), reference):
        assert "Completed" in senders.deployment(form)
    other = {**spec, "name": "other", "model": {"kind": "xgboost", "rounds": 6}}
    placed = senders.deployment(other, name="placed")
    assert "train placed as train/placed" in placed
    assert "export placed as export/placed" in placed
    with senders.cluster.network["store"].inside():
        assert (Store.open().versions("plain"), Store.open().versions("other")) == ([1], [1])


def _failures_say_why(senders: Senders) -> None:
    gone = str(senders.disks["c"] / "project/model/spec.yaml")
    assert "there is no such file on a, where the run is" in senders.deployment(gone, code=1)
    spec = senders.disks["c"] / "project/model/spec.yaml"
    senders.run("c", "sed", "-i", "s/hours > 30/hours > 3000/", spec)
    said = senders.run("c", _CI / "train", spec, "report.md", code=1)
    assert "hours > 3000" in said
    assert "hours > 3000" in senders.run("c", "cat", "report.md")
    senders.run("c", _CI / "train", spec, "report.md", code=2, SERIN_STORE="")
    report = senders.run("c", "cat", "report.md")
    assert report.startswith("## No run")
    assert "SERIN_STORE: is not set" in report
