"""Hosts from which runs are sent to a worker that shares no disk with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts_cluster import LOGIN, Cluster, start_prefect
from tests.cluster.small_pipeline import PREFECT, SERIN


class Senders:
    """A Prefect server and workers on host a; b and c send runs. Each host sees its own folder alone. `variables`:
    more of them for all hosts."""

    def __init__(self, cluster: Cluster, **variables: str) -> None:
        self.cluster, self.folder, self.variables = cluster, cluster.folder, variables
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

    def start(self, **worker: str) -> None:
        """`worker`: variables of the workers alone."""
        server = {
            "PREFECT_HOME": str(self.disks["a"] / "prefect"),
            "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",  # to `prefect deployment run --watch`
            "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        }
        host, log = self.cluster.network["a"], self.disks["a"] / "prefect.log"
        self.processes.append(start_prefect(host, self.url, self.environment("a", **server), log=log))
        self.serin("a", "deploy")
        for pool in ("cpu", "gpu"):
            self.keep("a", "worker", pool, **worker)

    def keep(self, host: str, *words: str, **more: str) -> None:
        """Starts a command that stays, such as a worker."""
        log, environment = self.disks[host] / f"{'-'.join(words)}.log", self.environment(host, **more)
        process = self.cluster.network[host].popen([*SERIN, *words], env=environment, log=log)
        self.processes.append(process)

    def environment(self, host: str, **more: str) -> dict[str, str]:
        disk = self.disks[host]
        named = {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": LOGIN, "HOME": str(disk)}
        own = {
            "SERIN_HOME": str(disk / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return self.cluster.environment(host, **{**self.variables, **named, **own, **more})

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
