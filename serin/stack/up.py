"""Starts the local stack, completely or not at all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from serin.errors import AlreadyUp, ExtraMissing, PrefectGone, ProcessFailed, StackUnusable
from serin.host.console import (
    NOT_INSTALLED,
    ConsolePlace,
    answers,
    choose_place,
    is_installed,
    read_settings,
)
from serin.host.down import clear_away
from serin.host.state import Stack, changing_stack, read_stack, write_stack
from serin.host.supervisor import Supervisor, wait_until_ready
from serin.host.wiring import (
    build_gateway,
    console_process,
    console_socket,
    key_file,
    launch_stack,
    loop_process,
    prepare_gateway,
    start_serving,
    start_watching,
)
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.ports import LOOPBACK, Claims, choose_port, is_free
from serin.machine.process import Process
from serin.prefect import processes, rest_api
from serin.prefect.login import named_server
from serin.prefect.start import start_prefect, use_prefect
from serin.serving.envoy.gateway import DRAIN_S
from serin.serving.envoy.pages import Pages
from serin.serving.envoy.tls import TlsFiles
from serin.serving.triton.installation import find_request_filter, find_triton

logger = logging.getLogger(__name__)

_GATEWAY_PORTS = (8080, 8081, 8082)
_PREFECT_PORTS = (4200, 4201, 4202)
_PAGES_PORTS = (8443, 8444, 8445)


def bring_up(
    home: Path,
    *,
    address: str = LOOPBACK,
    port: int | None = None,
    ui_port: int | None = None,
    tls: TlsFiles | None = None,
    envoy_file: Path | None = None,
) -> Stack:
    """Starts a stack in `home` and waits until everything is ready. On any failure everything is ended again.

    `address`, `tls` and `envoy_file` are for the gateway (serving/gateway.py). Other machines reach it only with TLS
    and keys. With `tls` and no other option, the gateway of a stack that is up switches to TLS, or to other files.
    """
    _check_installation()
    environment.metrics_address()  # raises SpecError for one that is not valid
    make_private(home)
    with changing_stack(home), Claims() as claims:
        last = read_stack(home)
        if last is not None and last.is_alive:
            if tls is None or port or ui_port or envoy_file or address != LOOPBACK:
                raise AlreadyUp(home=home, pid=last.supervisor_pid)
            return _switch_tls_on(last, tls)
        check_address(home, address, tls)
        leftovers = clear_away(home)
        if leftovers:
            logger.info(f"cleaned up after a stack that had crashed: {leftovers}")
        gateway_port = _gateway_port(claims, last, port, address)
        foreign = None if ui_port is not None else _foreign_prefect()
        prefect_port = _prefect_port(claims, last, ui_port) if foreign is None else None
        console = _console(claims, last)
        pages = _pages(home, address, claims, last, prefect_port, console)
        with _down_on_failure(home):
            prepare_gateway(home, gateway_port, address, tls=tls, expert=envoy_file, pages=pages)
            _say_what_changed(last, address, tls)
            planned = Stack(
                home=home,
                gateway_port=gateway_port,
                prefect_api_url=foreign or f"http://{LOOPBACK}:{prefect_port}/api",
                prefect_port=prefect_port,
                tls=tls is not None,
                console_url=console.url if console else None,
                console_port=console.port if console else None,
                address=address,
                pages_port=pages.port if pages else None,
            )
            return _start(planned)


def check_address(home: Path, address: str, tls: TlsFiles | None) -> None:
    """Raises StackUnusable for an address that is not this machine's, and for one that other machines reach while
    something that guards the gateway is missing."""
    known = _is_ip(address) and is_free(0, address)
    if not known:
        raise StackUnusable(
            problem=f"--address {address} is not an IP address of this machine; 0.0.0.0 stands for all of them"
        )
    if ip_address(address).is_loopback:
        return
    has = {
        "TLS (--tls-cert and --tls-key)": tls is not None,
        "API keys (`serin keys create NAME`)": key_file(home).read().required,
        "the request filter (`serin install gateway`)": find_request_filter() is not None,
    }
    missing = [what for what, present in has.items() if not present]
    if missing:
        raise StackUnusable(
            problem=f"--address {address} lets other machines reach the gateway, so it needs {' and '.join(missing)}"
        )


def _is_ip(address: str) -> bool:
    try:
        return bool(ip_address(address))
    except ValueError:
        return False


def _say_what_changed(last: Stack | None, address: str, tls: TlsFiles | None) -> None:
    """An option that is left out has its default again, which clients notice."""
    if last is not None and last.tls and tls is None:
        logger.info(
            "the last gateway here used TLS, this one does not: pass --tls-cert and --tls-key to keep it"
        )
    if last is not None and last.is_public and address == LOOPBACK:
        logger.info(
            "other machines could reach the last gateway here, this one they cannot: "
            f"pass --address {last.address} to keep it"
        )


def _gateway_port(claims: Claims, last: Stack | None, asked: int | None, address: str) -> int:
    sticky = (last.gateway_port,) if last else ()
    preferred = (*sticky, *_GATEWAY_PORTS)
    return choose_port(claims, asked=asked, option="--port", preferred=preferred, address=address)


def _prefect_port(claims: Claims, last: Stack | None, asked: int | None) -> int:
    sticky = (last.prefect_port,) if last and last.prefect_port else ()
    return choose_port(claims, asked=asked, option="--ui-port", preferred=(*sticky, *_PREFECT_PORTS))


def _pages(
    home: Path,
    address: str,
    claims: Claims,
    last: Stack | None,
    prefect_port: int | None,
    console: ConsolePlace | None,
) -> Pages | None:
    """Returns where other machines find the console and the stack's Prefect API; None: they do not reach this one."""
    if ip_address(address).is_loopback:
        return None
    sticky = (last.pages_port,) if last and last.pages_port else ()
    port = choose_port(claims, asked=None, option="", preferred=(*sticky, *_PAGES_PORTS), address=address)
    socket = console_socket(home) if console else None
    return Pages(address=address, port=port, console=socket, prefect_port=prefect_port)


def _console(claims: Claims, last: Stack | None) -> ConsolePlace | None:
    if not is_installed():
        logger.info(NOT_INSTALLED)
        return None
    return choose_place(read_settings(), claims, last=last.console_port if last else None)


def _switch_tls_on(stack: Stack, tls: TlsFiles) -> Stack:
    build_gateway(stack.home).tls.switch_on(tls)
    switched = replace(stack, tls=True)
    write_stack(switched)
    logger.info(f"the gateway uses TLS now; open connections without TLS end within {DRAIN_S} s")
    return switched


def _check_installation() -> None:
    """Reports missing requirements before anything is started."""
    if not sys.platform.startswith("linux"):
        raise StackUnusable(
            problem="the local stack needs Linux (Triton's wheel is Linux only); elsewhere use docker/compose.yaml"
        )
    if importlib.util.find_spec("prefect") is None:
        raise ExtraMissing(package="Prefect, which the local stack needs,", extra="flows")
    if not importlib.metadata.entry_points(group="prefect.collections", name="serin"):
        raise StackUnusable(
            problem="this environment does not register Serin's Prefect worker: it was installed from older sources; "
            "install again (in a checkout: make install, or pip install --no-deps -e .)"
        )
    find_triton()


def _foreign_prefect() -> str | None:
    """Returns the server that PREFECT_API_URL names, if it answers. A dead one on this machine was a stack's: None."""
    url = named_server()
    if url is None or rest_api.answers(url):
        return url
    raise PrefectGone(
        url=url, reason="PREFECT_API_URL names it; start that server, or unset the variable to get one here"
    )


def _start(planned: Stack) -> Stack:
    began = time.monotonic()
    stack, home = launch_stack(planned), planned.home
    supervisor, gateway, settler = Supervisor(home), build_gateway(home), processes.reconciler(stack)
    supervisor.start(gateway.process())
    if stack.owns_prefect:
        start_prefect(stack, when_it_answers=partial(_start_rest, stack, settler))
    else:
        _start_rest(stack, settler)
        use_prefect(stack)
    wait_until_ready(supervisor, gateway.process(), gateway.ready)
    for process in (loop_process(stack), settler):
        wait_until_ready(supervisor, process, partial(supervisor.runs, process.name))
    if stack.console_port is not None:
        _wait_for_console(supervisor, home, stack.console_port)
    start_watching(stack)
    processes.note_up(home)
    logger.info(f"up after {time.monotonic() - began:.1f} s")
    return stack


def _start_rest(stack: Stack, settler: Process) -> None:
    start_serving(stack)
    Supervisor(stack.home).start(settler)


def _wait_for_console(supervisor: Supervisor, home: Path, port: int) -> None:
    """Waits until the console answers. A stack serves its models without one, so a failure is only reported."""
    ready = partial(answers, read_settings().address, port)
    try:
        wait_until_ready(supervisor, console_process(home), ready)
    except ProcessFailed as failure:
        logger.info(f"the console does not answer; everything else runs: {failure}")


@contextmanager
def _down_on_failure(home: Path) -> Iterator[None]:
    """Takes the stack down on any failure, also after a KeyboardInterrupt: half a stack is worse than none."""
    whole = False
    try:
        yield
        whole = True
    finally:
        if not whole:
            logger.info("taking everything down again")
            clear_away(home)
