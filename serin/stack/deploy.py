"""Work pools and deployments on the stack's Prefect server, from the application folder, by Prefect's own command."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from serin import environment
from serin.errors import ProcessFailed
from serin.hardware import inventory
from serin.stack import prefect_api
from serin.stack.processes import POOLS
from serin.stack.state import Stack

_FILE = "deployments/prefect.yaml"
_SECONDS = 120.0


def make_pools(stack: Stack, settings: Mapping[str, str]) -> None:
    """The pools cpu and gpu. Those of somebody else's server are made when missing and otherwise left alone."""
    for pool in POOLS:
        template = environment.application_folder() / "deployments" / f"{pool}-pool.json"
        if stack.prefect_port is not None:
            slots = max(1, len(inventory())) if pool == "gpu" else None
            prefect_api.ensure_pool(
                stack.prefect_api_url,
                pool,
                template=json.loads(template.read_text()) if template.exists() else None,
                slots=slots,
            )
        elif _prefect(["work-pool", "inspect", pool], settings).returncode != 0:
            command = ["work-pool", "create", pool, "--type", "process", "--base-job-template", str(template)]
            _demand(_prefect(command, settings), name=f"the work pool {pool}", home=stack.home)


def apply_deployments(stack: Stack, settings: Mapping[str, str]) -> list[str]:
    """Every deployment of deployments/prefect.yaml is on the server; skipped when nothing changed since last time."""
    own = stack.prefect_port is not None
    noted = stack.home / "stack" / "deployed.json"
    wanted = {"digest": _digest(environment.application_folder())}
    if own and noted.exists() and json.loads(noted.read_text()) == wanted:
        names = prefect_api.deployments(stack.prefect_api_url)
        if names:
            return names
    done = _prefect(["deploy", "--all", "--prefect-file", _FILE], settings)
    _demand(done, name="the deployments", home=stack.home)
    noted.write_text(json.dumps(wanted))
    return prefect_api.deployments(stack.prefect_api_url) if own else ["applied"]


def _prefect(arguments: list[str], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=environment.application_folder(),
        env=dict(settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def _demand(done: subprocess.CompletedProcess[str], *, name: str, home: Path) -> None:
    log = home / "logs" / "deploy.log"
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise ProcessFailed(
            name=name, reason=f"prefect exited with code {done.returncode}", log=log, tail=tail
        )


def _digest(application: Path) -> str:
    """Of everything a deployment is made from: its file, the flows' parameters, where the code lies."""
    found = hashlib.sha256(f"{application}\0{sys.executable}".encode())
    spec = Path(environment.__file__).parent / "spec"
    for folder in (application / "deployments", application / "flows", spec):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"\0{path}\0".encode() + path.read_bytes())
    return found.hexdigest()
