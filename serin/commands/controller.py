"""The command `serin controller`: a rollout controller for several hosts, in the foreground."""

from __future__ import annotations

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
    from serin.cluster.controller import run
    from serin.host.standing import log_to_stdout, stop_on_signals

    stop = stop_on_signals()
    with without_progress_lines():
        log_to_stdout()
        run(environment.home(), fleet, stop)
