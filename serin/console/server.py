"""The console's process: `python -m serin.console.server`. It listens where stack.json says."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import uvicorn

from serin.console.app import build_app
from serin.host.console import ROLES, read_settings, role_secret
from serin.host.standing import begin_beats, log_to_stdout, run_server
from serin.host.state import read_stack
from serin.host.wiring import console_socket
from serin.machine import environment

log = logging.getLogger("serin.console.server")  # not __name__, which is __main__ here


def main() -> None:
    log_to_stdout()
    home, settings = environment.home(), read_settings()
    stack = read_stack(home)
    if stack is None or stack.console_port is None:
        sys.exit(f"no stack with a console was started in {home}; run `serin up`")
    for role in ROLES:
        role_secret(home, role)
    log.info("the console listens on %s:%d", settings.address, stack.console_port)
    config = uvicorn.Config(
        build_app(home, settings, stack.console_port),
        host=settings.address,
        port=stack.console_port,
        access_log=False,
        log_config=None,
        proxy_headers=settings.url is not None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    begin_beats(home)
    run_server(config, sockets=[config.bind_socket(), listen_to_gateway(console_socket(home))])


def listen_to_gateway(path: Path) -> socket.socket:
    """Returns a socket at which only the stack's own gateway asks, for people on other machines (guard.py)."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    path.chmod(0o600)
    return listening


if __name__ == "__main__":
    main()
