"""Serving alone, in the foreground: gateway, controller and the releases they need. A container runs this.

`python -m serin.stack.serve --address 0.0.0.0 --port 8080`. On SIGTERM it answers requests in flight and ends
everything; after a kill, the next one resumes from the journals. Prefect and its workers run in other containers.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from pathlib import Path

from serin.errors import AlreadyUp, SerinError
from serin.host.console import NOT_INSTALLED, ConsolePlace, choose_place, is_installed, read_settings
from serin.host.down import clear_away, take_down
from serin.host.standing import log_to_stdout, stop_on_signals
from serin.host.state import Stack, changing_stack, read_stack
from serin.host.supervisor import Supervisor, wait_until_ready
from serin.host.wiring import (
    build_gateway,
    launch_stack,
    prepare_gateway,
    start_serving,
    start_watching,
    watch_supervisor,
)
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.ports import Claims
from serin.serving.envoy.tls import TlsFiles, tls_pair
from serin.serving.triton.release_record import check_records

log = logging.getLogger("serin.stack.serve")  # not __name__, which is __main__ here


def serve(
    home: Path,
    *,
    address: str,
    port: int,
    stop: threading.Event,
    tls: TlsFiles | None = None,
    envoy_file: Path | None = None,
) -> None:
    """Serves until `stop` is set. Raises ProcessFailed when the gateway does not start or the supervisor exits."""
    make_private(home)
    with changing_stack(home):
        last = read_stack(home)
        if last is not None and last.is_alive:
            raise AlreadyUp(home=home, pid=last.supervisor_pid)
        check_records(home / "releases")
        clear_away(home)
        reached_on = prepare_gateway(home, port, address, tls=tls, expert=envoy_file)
        url, console = environment.text("PREFECT_API_URL") or "", _console(last)
        stack = launch_stack(
            Stack(
                home=home,
                gateway_port=port,
                prefect_api_url=url,
                tls=tls is not None,
                console_url=console.url if console else None,
                console_port=console.port if console else None,
            )
        )
    try:
        supervisor, gateway = Supervisor(home), build_gateway(home)
        supervisor.start(gateway.process())
        start_serving(stack)
        wait_until_ready(supervisor, gateway.process(), lambda: stop.is_set() or gateway.ready())
        start_watching(stack)
        log.info("serving on %s:%d", reached_on, port)
        watch_supervisor(stack, stop)
    finally:
        take_down(home)


def _console(last: Stack | None) -> ConsolePlace | None:
    """Returns the console's place when SERIN_CONSOLE names its settings: in a container nobody reaches a free port."""
    if environment.path("SERIN_CONSOLE") is None:
        return None
    if not is_installed():
        log.warning(NOT_INSTALLED)
        return None
    with Claims() as claims:
        return choose_place(read_settings(), claims, last=last.console_port if last else None)


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serin.stack.serve", description=__doc__)
    parser.add_argument(
        "--address", default="127.0.0.1", help="address on which the gateway listens (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8080, help="port of the gateway (%(default)s)")
    parser.add_argument(
        "--tls-cert", type=Path, help="PEM file of the certificate and its chain; needs --tls-key"
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file of the certificate's private key")
    parser.add_argument(
        "--envoy", type=Path, help="file with additional Envoy settings (docs/how-to/secure.md)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options(sys.argv[1:])
    log_to_stdout()
    stop = stop_on_signals()
    try:
        serve(
            environment.home(),
            address=options.address,
            port=options.port,
            stop=stop,
            tls=tls_pair(options.tls_cert, options.tls_key),
            envoy_file=options.envoy,
        )
    except SerinError as error:
        sys.exit(f"serving cannot continue: {error}")


if __name__ == "__main__":
    main()
