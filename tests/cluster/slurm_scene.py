"""A Slurm cluster with a Prefect server that its nodes reach, and Serin's workers for the pools cpu and gpu."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.errors import PrefectGone
from serin.machine.ports import free_ports
from serin.prefect.follow import FINAL, begin_run
from serin.prefect.rest_api import Api, answers, call, run_log
from tests.cluster.slurm import SlurmCluster, end, wait_until

ROOT = Path(__file__).resolve().parents[2]
POOLS = ("cpu", "gpu")


@dataclass(kw_only=True)
class Scene:
    """What a user has: a home that all nodes see, a Prefect server, pools on Slurm."""

    cluster: SlurmCluster
    home: Path
    api: Api
    variables: dict[str, str]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_worker(self, pool: str) -> None:
        template = ROOT / "deployments" / "slurm" / f"{pool}-pool.json"
        log = self.home / "logs" / f"worker-{pool}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.workers[pool] = subprocess.Popen(
                [
                    sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool,
                    "--type", "serin-slurm", "--name", f"slurm-{pool}", "--install-policy", "never",
                    "--base-job-template", str(template),
                ],
                cwd=ROOT, env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill_worker(self, pool: str) -> None:
        process = self.workers.pop(pool)
        process.kill()
        process.wait(30)

    def set_pool(self, pool: str, **defaults: Any) -> None:
        """Changes the defaults of a pool's variables, as its page in Prefect does."""
        template = json.loads((ROOT / "deployments" / "slurm" / f"{pool}-pool.json").read_text())
        for name, value in defaults.items():
            template["variables"]["properties"][name]["default"] = value
        call(self.api, "PATCH", f"/work_pools/{pool}", {"base_job_template": template})

    def begin(self, deployment: str, parameters: dict[str, Any], **variables: Any) -> str:
        """Requests a run; returns its id. `variables`: job variables of this run."""
        if not variables:
            return str(begin_run(self.api, deployment, parameters, tags=[])["id"])
        found = call(self.api, "GET", f"/deployments/name/{deployment}")
        body = {"parameters": parameters, "job_variables": variables}
        return str(call(self.api, "POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def cancel(self, run: str) -> None:
        """Cancels a run as Prefect's page does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        call(self.api, "POST", f"/flow_runs/{run}/set_state", {"state": state})

    def run(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = call(self.api, "GET", f"/flow_runs/{run}")
        return found

    def state(self, run: str) -> str:
        return str(self.run(run)["state_type"])

    def log(self, run: str) -> str:
        return "\n".join(run_log(self.api, run, lines=200))

    def job_of(self, run: str) -> dict[str, str] | None:
        found = [job for job in self.cluster.jobs() if job["JobName"] == run]
        return found[-1] if found else None

    def wait_for(self, run: str, *states: str, within_s: float = 600.0) -> dict[str, Any]:
        """Waits for a state of a run; at once an error when it has ended otherwise."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(PrefectGone):
                found = self.run(run)
                if found["state_type"] in states:
                    return found
                if found["state_type"] in FINAL or time.monotonic() > deadline:
                    raise AssertionError(
                        f"{found['name']} is {found['state_name']}: {found['state']['message']}\n{self.log(run)}\n"
                        f"{self.cluster.command('squeue', '-t', 'all')}\n{self._outputs()}"
                    )
            time.sleep(0.3)

    def wait_in_log(self, run: str, words: str, *, within_s: float = 600.0) -> None:
        wait_until(
            lambda: words in self.log(run), f"{words!r} in the log", lambda: self.log(run), within_s=within_s
        )

    def _outputs(self) -> str:
        files = sorted((self.home / "logs").rglob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


@contextlib.contextmanager
def slurm_scene(cluster: SlurmCluster, home: Path) -> Iterator[Scene]:
    home.mkdir(mode=0o700, parents=True)
    (port,) = free_ports(1)
    login = f"serin:{secrets.token_urlsafe(24)}"
    url = f"http://{cluster.address}:{port}/api"
    variables = {
        **os.environ, **cluster.environment, "PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": login,
        "PREFECT_HOME": str(home / "prefect"), "SERIN_HOME": str(home), "SERIN_STORE": str(home / "store"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json", "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
        "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    (home / "prefect").mkdir(mode=0o700)
    scene = Scene(cluster=cluster, home=home, api=Api(url, login), variables=variables)
    with contextlib.ExitStack() as stack:
        with (home / "server.log").open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--host", cluster.address,
                 "--port", str(port)],
                env={**variables, "PREFECT_SERVER_API_AUTH_STRING": login, "PREFECT_SERVER_DATABASE_TIMEOUT": "120",
                     "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "120"}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        stack.callback(end, server)
        wait_until(lambda: answers(url), "the Prefect server", (home / "server.log").read_text, within_s=500)
        stack.callback(lambda: [end(process) for process in scene.workers.values()])
        for pool in POOLS:
            scene.start_worker(pool)
        wait_until(lambda: _pools(scene.api) >= set(POOLS), "the pools", scene._outputs, within_s=500)
        deployed = subprocess.run(
            [sys.executable, "-m", "serin.cli", "deploy"], env=variables, capture_output=True, text=True
        )
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        yield scene


def _pools(api: Api) -> set[str]:
    return {pool["name"] for pool in call(api, "POST", "/work_pools/filter", {})}
