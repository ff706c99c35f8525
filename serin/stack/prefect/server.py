"""The stack's Prefect server: `python -m serin.stack.prefect.server PORT [--no-services]`.

It is Prefect's own application, as `prefect server start` runs it, behind `Repeating`. The garbage collector is off
during the imports, which take seconds; afterwards a thread collects, not the event loop.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import threading
import time

import uvicorn

from serin.machine import environment
from serin.stack.host.standing import begin_beats, run_server
from serin.stack.prefect.repeating import Repeating

_HOST = "127.0.0.1"
_COLLECT_S, _FULL_EVERY = 1.0, 30
_WAITS_S = 30.0  # its loop may wait for another writer of the database


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serin.stack.prefect.server", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--no-services", action="store_true", help="schedule nothing and write no events")
    given = parser.parse_args()
    gc.disable()
    prefect = importlib.import_module("prefect.server.api.server")
    settings = importlib.import_module("prefect.settings").get_current_settings().server
    gc.freeze()
    collect_beside()
    begin_beats(environment.home(), waits_s=_WAITS_S)
    config = uvicorn.Config(
        Repeating(prefect.create_app(final=True, webserver_only=given.no_services)),
        host=_HOST,
        port=given.port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    run_server(config)


def collect_beside() -> None:
    """Leaves garbage to a thread. A cursor among it needs its connection, which may be waiting for SQLite's lock for up
    to a minute; if the event loop waited for that, nobody would release the lock."""

    def collect() -> None:
        for number in itertools.count(1):
            time.sleep(_COLLECT_S)
            gc.collect(2 if number % _FULL_EVERY == 0 else 1)

    gc.disable()
    threading.Thread(target=collect, name="garbage", daemon=True).start()


if __name__ == "__main__":
    main()
