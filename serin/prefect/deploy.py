"""Creates work pools and deployments on the stack's Prefect server, with Prefect's own command."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from serin.errors import NotFound, NotUp, ProcessFailed
from serin.host.logs import log_tail
from serin.host.state import POOLS, Stack, read_stack
from serin.host.supervisor import Supervisor
from serin.machine import environment
from serin.machine.environment import application_folder
from serin.machine.hardware import inventory
from serin.machine.process import Process
from serin.prefect import rest_api
from serin.prefect.login import callers_api, stack_api
from serin.prefect.processes import SLURM_TYPE, WORKER_TYPE, prefect_environment, prefect_worker
from serin.spec import section

logger = logging.getLogger(__name__)

_LOOPBACK = (
    "the Prefect server at %s answers on this machine only: jobs on other nodes need one that they reach "
    "(PREFECT_API_URL)"
)
_FILE = Path("deployments/prefect.yaml")
_SCHEDULED_S, _LOOK_S = 15.0, 0.5
_SECONDS = 600.0  # ten seconds of work; minutes on a busy machine


def pool_template(pool: str, *, kind: str = WORKER_TYPE) -> Path:
    folder = application_folder() / "deployments"
    return (folder / "slurm" if kind == SLURM_TYPE else folder) / f"{pool}-pool.json"


def _template(pool: str, kind: str = WORKER_TYPE) -> dict[str, Any]:
    return dict(json.loads(pool_template(pool, kind=kind).read_text()))


def make_pools(api: rest_api.Api) -> None:
    """Creates the pools cpu and gpu on the stack's own server.

    Leases queue the work for the GPUs of this machine, by priority. Without a GPU `gpu` has one slot: trainings follow
    one another.

    A pool that somebody has made for other infrastructure, such as Slurm, is left as it is, and so is one that has
    these settings already.
    """
    for pool in POOLS:
        found = rest_api.read_pool(api, pool)
        if found is not None and found["type"] != WORKER_TYPE:
            continue
        slots = 1 if pool == "gpu" and not inventory() else None
        wanted = {"type": WORKER_TYPE, "base_job_template": _template(pool), "concurrency_limit": slots}
        if found is None or any(found.get(name, ...) != value for name, value in wanted.items()):
            rest_api.ensure_pool(api, pool, kind=WORKER_TYPE, template=_template(pool), slots=slots)


def make_missing_pools(api: rest_api.Api) -> None:
    """Creates the pools cpu and gpu on a server for several hosts, without a limit: each host leases its own GPUs."""
    for pool in POOLS:
        if rest_api.pool_type(api, pool) is None:
            rest_api.ensure_pool(api, pool, kind=WORKER_TYPE, template=_template(pool), slots=None)


def worker_for(stack: Stack, pool: str) -> Process | None:
    """Returns the stack's worker for a pool, of the pool's type; None for a type whose workers run elsewhere."""
    kind = rest_api.pool_type(stack_api(stack), pool) or WORKER_TYPE
    if kind not in (WORKER_TYPE, SLURM_TYPE):
        return None
    return prefect_worker(stack, pool, template=pool_template(pool, kind=kind), kind=kind)


def deploy(home: Path, file: Path | None = None, *, slurm: Collection[str] = ()) -> list[str]:
    """Applies a file of deployments, schedules and automations to a server and returns them, each with its next run.
    Repeating it changes nothing.

    The server is that of the stack in `home`, or the one that PREFECT_API_URL names if no stack is up. `file`: your
    own; None: deployments/prefect.yaml. `slurm`: work pools whose runs become Slurm jobs.
    """
    stack, url = read_stack(home), environment.text("PREFECT_API_URL")
    if stack is not None and stack.is_alive and stack.prefect_api_url:  # an agent may have no Prefect
        url, own = stack.prefect_api_url, stack.owns_prefect
        settings, api = prefect_environment(home, url, own=own), stack_api(stack)
        _use_slurm(api, slurm)
        for worker in filter(None, [worker_for(stack, pool) for pool in slurm]):
            Supervisor(home).start(worker)
        if slurm and own:
            logger.warning(_LOOPBACK, url)
        if file is None:
            (make_pools if own else make_missing_pools)(api)
            apply_deployments(stack, settings, again=True)
            return _applied(api, application_folder() / _FILE)
    elif url is None:
        raise NotUp(home=home)
    else:
        settings = prefect_environment(home, url, own=False)
        api = callers_api(url)
        _use_slurm(api, slurm)
        make_missing_pools(api)
    log = home / "logs" / "deploy.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    apply_file(settings, log, file=None if file is None else file.absolute())
    return _applied(api, file or application_folder() / _FILE)


def _applied(api: rest_api.Api, file: Path) -> list[str]:
    """Returns the deployments of a file as flow/name, each with its next run."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))  # Prefect has read it
    names = [str(entry.get("name")) for entry in content.get("deployments") or ()]
    found = rest_api.query(api, "deployments", deployments={"name": {"any_": names}}, limit=rest_api.PAGE)
    flows = rest_api.flow_names(api)
    return sorted(
        f"{flows.get(entry['flow_id'], '?')}/{entry['name']}: {_next_run(api, entry)}" for entry in found
    )


def _next_run(api: rest_api.Api, deployment: Mapping[str, Any]) -> str:
    """Waits for the server's scheduler, which plans the runs of a new schedule within seconds."""
    if not any(schedule.get("active") for schedule in deployment.get("schedules") or ()):
        return "without a schedule; it runs when it is started"
    if deployment.get("paused"):
        return "paused"
    deadline = time.monotonic() + _SCHEDULED_S
    while (t := rest_api.next_run(api, deployment["id"])) is None:
        if time.monotonic() > deadline:
            return "scheduled; its next run is not planned yet"
        time.sleep(_LOOK_S)
    return f"next run {datetime.fromisoformat(t).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _use_slurm(api: rest_api.Api, pools: Collection[str]) -> None:
    """Replaces pools of another type. A pool that is Slurm's keeps its variables, which its page may have changed."""
    for pool in pools:
        if pool not in POOLS:
            raise NotFound(kind="work pool", name=pool, known=list(POOLS))
        if rest_api.pool_type(api, pool) != SLURM_TYPE:
            rest_api.ensure_pool(api, pool, kind=SLURM_TYPE, template=_template(pool, SLURM_TYPE), slots=None)


def apply_deployments(stack: Stack, settings: Mapping[str, str], *, again: bool = False) -> list[str]:
    """Applies every deployment of deployments/prefect.yaml; skipped when nothing changed since last time, unless
    `again`."""
    digest = deployments_digest()
    if not again and stack.owns_prefect and are_deployed(stack.home, digest):
        names = rest_api.deployments(stack_api(stack))
        if names:
            return names
    apply_file(settings, stack.home / "logs" / "deploy.log")
    note_deployed(stack.home, digest)
    return (
        rest_api.deployments(stack_api(stack))
        if stack.owns_prefect
        else [f"applied to {stack.prefect_api_url}"]
    )


def are_deployed(home: Path, digest: str) -> bool:
    """Returns whether the deployments of this digest were the last that were applied."""
    noted = _deployed(home)
    return noted.exists() and bool(json.loads(noted.read_text()) == {"digest": digest})


def note_deployed(home: Path, digest: str) -> None:
    noted = _deployed(home)
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text(json.dumps({"digest": digest}))


def _deployed(home: Path) -> Path:
    return home / "stack" / "deployed.json"


def apply_file(settings: Mapping[str, str], log: Path, *, file: Path | None = None) -> None:
    """Runs Prefect's command on a file of deployments (None: deployments/prefect.yaml); raises ProcessFailed with the
    end of its output when it fails."""
    with log.open("wb") as output:
        try:
            command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file"]
            code = subprocess.run(
                [*command, str(file or _FILE)],
                cwd=application_folder(),
                env=dict(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
            ).returncode
            reason = f"prefect exited with code {code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"not finished within {_SECONDS:.0f} s"
    if code != 0:
        raise ProcessFailed(name="prefect deploy", reason=reason, log=log, tail=log_tail(log))


def deployments_digest() -> str:
    """Returns a digest of everything a deployment depends on: its file, the flows' parameters, the location of the
    code."""
    application = application_folder()
    found = hashlib.sha256(f"{application}\0{sys.executable}".encode())
    spec = Path(section.__file__).parent
    for folder in (application / "deployments", application / "flows", spec):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"\0{path}\0".encode() + path.read_bytes())
    return found.hexdigest()
