"""The environment of the stack's processes, and Serin's modules that run as long as the stack does."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serin.errors import SerinError
from serin.host.process_scan import STACK_MARK
from serin.host.watchdog import beat_file
from serin.machine import environment, heartbeat
from serin.machine.process import Process

_STORE_AWAY_S = 150.0  # that a patient call of an object store takes at most


def stack_environment(home: Path) -> dict[str, str]:
    """Returns the base environment of the stack's processes: the caller's, with this home and the stack's mark.

    The caller's credentials for Prefect are left out: a served model must not have them.
    """
    store = environment.store_url()
    names = ("SERIN_SIGNING_KEY", "SERIN_TRUSTED_KEYS", "SERIN_EVENTS_PASSWORD_FILE", "SERIN_EVENTS_CA")
    files = {name: environment.path(name) for name in names}
    return environment.child_environment(
        **dict.fromkeys(environment.prefect_credentials()),
        **{name: str(path) for name, path in files.items() if path},  # the stack has another working folder
        SERIN_HOME=str(home),
        SERIN_STORE=store if "://" in store else str(Path(store).expanduser().absolute()),
        PYTHONUNBUFFERED="1",
        **{STACK_MARK: str(home)},
    )


def standing_process(home: Path, name: str, module: str, settings: dict[str, str] | None = None) -> Process:
    """Returns a process description of `python -m module`, which the stack keeps running under `name`."""
    return Process(
        name=name,
        command=(sys.executable, "-m", module),
        environment=stack_environment(home) if settings is None else settings,
        folder=home,
        log=home / "logs" / f"{name}.log",
        stop_s=10.0,
    )


def log_to_stdout() -> None:
    """Writes the records of Serin's loggers to standard output, one line each with its time; supervisord stores
    them."""
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    logging.getLogger("serin").setLevel(logging.INFO)


def begin_beats(home: Path, *, waits_s: float = 0.0, asks_store: bool = False) -> None:
    """Lets the main loop of this process prove that it works, if a supervisor watches it (machine/heartbeat.py).

    `asks_store`: the loop itself waits for the store, which may be elsewhere and away.
    """
    if environment.supervised():
        away_s = _STORE_AWAY_S if asks_store and "://" in environment.store_url() else 0.0
        heartbeat.begin(beat_file(home, os.getpid()), waits_s=max(waits_s, away_s))


def run_server(config: Any, **options: Any) -> None:
    """Runs uvicorn with a main loop that proves that it works."""
    import uvicorn  # here: few processes are servers

    class Server(uvicorn.Server):
        async def on_tick(self, counter: int) -> bool:
            heartbeat.beat()
            return await super().on_tick(counter)

    server = Server(config)
    server.run(**options)
    if not server.started:
        sys.exit("the server could not start; see above")


def run_standing(
    name: str,
    run: Callable[[Path, threading.Event], None],
    *,
    waits_s: float = 0.0,
    asks_store: bool = False,
) -> None:
    """Run the main loop of a process of the stack until a signal asks it to stop; exit with the reason when it cannot
    continue."""
    log_to_stdout()
    home, stop = environment.home(), stop_on_signals()
    begin_beats(home, waits_s=waits_s, asks_store=asks_store)
    try:
        run(home, stop)
    except SerinError as error:
        sys.exit(f"{name} cannot continue: {error}")


def stop_on_signals() -> threading.Event:
    """Returns an event that SIGTERM and SIGINT set, for a process that ends its work in order."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
