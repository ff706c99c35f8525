"""The console's process: `python -m serin.console.server`. It listens where stack.json says."""

from __future__ import annotations

import logging
import sys

import uvicorn

from serin.console.app import build_app
from serin.machine import environment
from serin.stack.console.secrets import ROLES, role_secret
from serin.stack.console.settings import read_settings
from serin.stack.host.standing import log_to_stdout
from serin.stack.host.state import read_stack

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
    uvicorn.run(
        build_app(home, settings, stack.console_port),
        host=settings.address,
        port=stack.console_port,
        access_log=False,
        log_config=None,
        proxy_headers=settings.url is not None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
