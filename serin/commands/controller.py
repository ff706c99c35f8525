"""The command `serin controller`: a rollout controller for several hosts, in the foreground."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Literal

import typer

from serin.machine import environment


def register(app: typer.Typer) -> None:
    app.command()(controller)


def controller(
    fleet: Annotated[
        Literal["agents", "kubernetes"],
        typer.Option(help="What runs the releases: hosts with `serin agent`, or Kubernetes."),
    ] = "agents",
) -> None:
    """Decide about rollouts on all hosts that share SERIN_STORE. Several may run: one leads, the others take over.

    Runs in the foreground until SIGTERM or SIGINT. `serin up` has its own controller.
    """
    from serin.api.progress import without_progress_lines
    from serin.stack.cluster.controller import run
    from serin.stack.host.standing import log_to_stdout

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with without_progress_lines():
        log_to_stdout()
        run(environment.home(), fleet, stop)
