"""A real MLflow server from PyPI, in a separate environment: its packages are not those of Serin."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from serin.machine.locks import locked
from serin.machine.ports import free_ports
from tests.kit.waiting import running, tail, until
from tests.signals import send_group

VERSION: Final = "3.17.2"  # that of mlflow-skinny in constraints.txt
_START_S: Final = 300.0  # it imports for a minute where several tests share two cores


def environment_folder() -> Path:
    """The environment with the server; it is made once, for all checkouts of this user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    folder = cache / "serin-tests" / f"mlflow-{VERSION}-python-{python}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not (folder / ".complete").exists():
            _install(folder)
            (folder / ".complete").touch()
    return folder


def _install(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    python = str(folder / "bin" / "python")
    how = (
        [uv, "pip", "install", "--quiet", "--python", python]
        if uv
        else [python, "-m", "pip", "install", "-q"]
    )
    subprocess.run([*how, f"mlflow=={VERSION}"], check=True)


@contextmanager
def mlflow_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """The URL of a server whose state is in `folder`; it has ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = port or free_ports(1)[0]
    program = environment_folder() / "bin" / "mlflow"
    command = [
        program, "server", "--host", "127.0.0.1", "--port", str(chosen), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", folder / "artifacts",
    ]  # fmt: skip
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=folder, start_new_session=True, env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{chosen}"
    try:
        until(
            lambda: _answers(url), "an MLflow server", within_s=_START_S, alive=running(process),
            said=tail(folder / "server.log"),
        )  # fmt: skip
        yield url
    finally:
        send_group(signal.SIGKILL, process.pid)  # its workers are in its group
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
