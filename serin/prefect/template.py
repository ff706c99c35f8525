"""Makes the template of Prefect's database for this installation: `python -m serin.prefect.template`.

A server without its services is started on an empty folder, the pools and deployments are applied, and the database is
saved before and after them. Nothing is written into Prefect's tables but by Prefect. One process makes it at a time:
stacks that start together for the first time wait for the first of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from serin.host.supervisor import READY_S, wait_while_alive
from serin.machine.durable import make_private
from serin.machine.locks import locked
from serin.machine.parent_death import die_with_parent
from serin.machine.ports import Claims, choose_port
from serin.prefect import prepared, processes, rest_api
from serin.prefect.deploy import apply_file, deployments_digest, make_pools
from serin.prefect.login import read_login

logger = logging.getLogger(__name__)

_STOP_S = 30.0
_SCRATCH = ".new-"

FAILURES = (ProcessFailed, OSError, sqlite3.Error)  # without a template a server prepares its database itself


def obtain_template() -> Path:
    """Returns the template with this installation's deployments; makes it where it is missing.

    A process that finds another one making it waits and uses that one's. The kernel frees the lock of a process that
    dies; the next one then makes the template. Raises one of FAILURES, also after a wait that took too long.
    """
    folder, digest = prepared.template_folder(), deployments_digest()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "lock"):
        for leftover in folder.glob(f"{_SCRATCH}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        whole = prepared.template_file(digest)
        if prepared.revision(whole) is None:
            _make_template(folder, digest, whole)
    return whole


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds the lock on making templates."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, wait_s=0.0, mode=0o600))
        except TimeoutError:
            logger.info("another process is preparing Prefect's database: waiting for it")
            held.enter_context(locked(lock, wait_s=READY_S, mode=0o600))
        yield


def _make_template(folder: Path, digest: str, whole: Path) -> None:
    """Makes the template without deployments, unless there is one already, and `whole` from it."""
    logger.info("preparing Prefect's database, once for this installation (about half a minute)")
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        home = Path(scratch) / "home"
        make_private(home)
        begun = prepared.copy_template(home, digest)
        with _server(home) as api:
            if begun is None:
                _save(prepared.database(home), prepared.template_file())
            logger.info("preparing Prefect's database: deployments")
            make_pools(api)
            settings = processes.prefect_environment(home, api.url, own=True)
            apply_file(settings, home / "logs" / "deploy.log")
        _save(prepared.database(home), whole)
    prepared.keep_newest()


@contextlib.contextmanager
def _server(home: Path) -> Iterator[rest_api.Api]:
    """A server on an empty database, without the services that would schedule runs or write events."""
    with Claims() as claims:
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


def prepare() -> None:
    """Makes the template where Prefect is installed, so that the first `serin up` need not. A failure is only reported:
    that command then makes it, or starts without."""
    if importlib.util.find_spec("prefect") is None:
        return
    try:
        obtain_template()
    except FAILURES as error:
        logger.info(f"Prefect's database is not prepared: {error}")


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("serin").setLevel(logging.INFO)
    prepare()


if __name__ == "__main__":
    main()
