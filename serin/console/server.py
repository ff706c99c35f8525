"""The console's process: `python -m serin.console.server`. It listens where stack.json says."""

from __future__ import annotations

import logging
import sys

import uvicorn

from serin.console.app import build_app
from serin.host.console import ACCOUNTS, FollowedSettings, account_secret
from serin.host.standing import begin_beats, log_to_stdout, run_server
from serin.host.state import read_stack
from serin.host.wiring import console_socket
from serin.machine import environment
from serin.machine.ports import private_socket
from serin.rollout.run.access import find_cluster

log = logging.getLogger("serin.console.server")  # not __name__, which is __main__ here

_PORT = 8090


def main() -> None:
    log_to_stdout()
    home, follow = environment.home(), FollowedSettings()
    settings = follow()
    stack = read_stack(home)
    port = stack.console_port if stack else None
    if port is None and find_cluster(home) is None:
        sys.exit(f"no stack with a console was started in {home}; run `serin up`")
    for account in ACCOUNTS:
        account_secret(home, account)
    own = port is not None  # else it is of several hosts, and runs on any machine
    port = port or settings.port or _PORT
    log.info("the console listens on %s:%d", settings.address, port)
    config = uvicorn.Config(
        build_app(home, settings, port, follow),
        host=settings.address,
        port=port,
        access_log=False,
        log_config=None,
        proxy_headers=settings.url is not None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    if own:
        begin_beats(home)
    # At the second one only the stack's own gateway asks, for people on other machines (guard.py).
    gateway = [private_socket(console_socket(home))] if own else []
    run_server(config, sockets=[config.bind_socket(), *gateway])


if __name__ == "__main__":
    main()
