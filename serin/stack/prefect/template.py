"""Makes the template of Prefect's database for this installation: `python -m serin.stack.prefect.template`.

A server without its services is started on an empty folder, the pools and deployments are applied, and the database is
saved before and after them. Nothing is written into Prefect's tables but by Prefect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from serin.errors import ProcessFailed
from serin.machine.parent_death import die_with_parent
from serin.machine.private import make_private
from serin.stack.host.ports import choose_port, port_claims
from serin.stack.host.waiting import wait_while_alive
from serin.stack.prefect import prepared, processes, rest_api
from serin.stack.prefect.deploy import apply_file, deployments_digest, make_pools
from serin.stack.prefect.login import read_login

logger = logging.getLogger(__name__)

_STOP_S = 30.0


def make_template() -> Path:
    """Makes the templates of this installation; returns the one with deployments. Raises ProcessFailed or OSError."""
    folder, digest = prepared.template_folder(), deployments_digest()
    folder.mkdir(parents=True, exist_ok=True)
    whole = prepared.template_file(digest)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as scratch:
        home = Path(scratch) / "home"
        make_private(home)
        with _server(home) as api:
            _save(prepared.database(home), prepared.template_file())
            logger.info("preparing Prefect's database for this installation: deployments")
            make_pools(api)
            settings = processes.prefect_environment(home, api.url, own=True)
            apply_file(settings, home / "logs" / "deploy.log")
        _save(prepared.database(home), whole)
    prepared.keep_newest()
    return whole


@contextlib.contextmanager
def _server(home: Path) -> Iterator[rest_api.Api]:
    """A server on an empty database, without the services that would schedule runs or write events."""
    with port_claims() as claims:
        port = choose_port(claims, asked=None, option="", preferred=())
        process = processes.prefect_server(home, port)
        process.log.parent.mkdir(parents=True)
        with process.log.open("wb") as output:
            server = subprocess.Popen(
                [*process.command, "--no-services"],
                env={**process.environment, "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "false"},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (it only calls prctl)
            )
        try:
            url = f"http://127.0.0.1:{port}/api"
            wait_while_alive(
                "Prefect's server", process.log, partial(rest_api.answers, url), partial(_ended, server)
            )
            yield rest_api.Api(url, read_login(home))
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _ended(server: subprocess.Popen[bytes]) -> str | None:
    return None if server.poll() is None else f"it exited with code {server.returncode}"


def _save(database: Path, target: Path) -> None:
    """Saves a database, which may be in use, as one file. The file appears only when it is complete."""
    scratch = database.with_name("template.db")
    scratch.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.execute("VACUUM INTO ?", (str(scratch),))
    scratch.chmod(0o600)
    shutil.move(scratch, target)


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("serin").setLevel(logging.INFO)
    if prepared.template_file(deployments_digest()).exists():
        return
    logger.info("preparing Prefect's database for this installation")
    try:
        make_template()
    except (
        ProcessFailed,
        OSError,
        sqlite3.Error,
    ) as error:  # the first `serin up` does it, or starts without
        logger.info(f"not prepared: {error}")


if __name__ == "__main__":
    main()
