"""A model in service: what its parts wrote last (logs), and how it is taken out (retire)."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from serin.commands.arguments import Model, Why, Yes
from serin.commands.output import confirm, say, show
from serin.commands.rollout import tell_controller
from serin.errors import NotFound
from serin.machine import environment

_POLL_S = 0.2


def register(app: typer.Typer) -> None:
    for command in (logs, retire):
        app.command()(command)


def retire(model: Model, yes: Yes = False, why: Why = "") -> None:
    """Take a model out of service: requests get 404, its servers end. Its versions stay in the store.

    Requests in flight are answered first. `serin rollout start MODEL:VERSION` serves a version again.
    """
    from serin.rollout.run.access import find_rollouts
    from serin.rollout.run.status import status_of

    rollouts = find_rollouts()
    status = status_of(rollouts, model)
    if status is not None and status.live is not None and not status.rollout.running:
        confirm(f"Take {model} (version {status.live}) out of service?", yes=yes)
    tell_controller("retire", model, why=why)
    while (now := status_of(rollouts, model)) is not None and now.rollout.running:
        time.sleep(_POLL_S)
    assert now is not None, "a journal does not lose its lines"
    if now.rollout.phase == "retired":
        show(f"{model} is retired; `serin rollout start {model}:{now.rollout.version}` serves it again")


def logs(
    model: Model,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Of each part, the last ones.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until interrupted.")] = False,
) -> None:
    """What a model's servers, the controller and the gateway wrote last about it."""
    from serin.stack.model_logs import find_logs, follow_logs, last_lines

    home = environment.home()
    found = find_logs(home, model)
    if not found:
        from serin.rollout.run.status import status

        raise NotFound(kind="log of model", name=model, known=[entry.name for entry in status(home)])
    new_lines = follow_logs(home, model)
    for source in found:
        recent = last_lines(source, lines)
        say(f"==> {source.name} ({source.path})")
        for line in recent:
            show(line)
    if follow:
        for name, line in new_lines:
            show(f"{name}: {line}")
