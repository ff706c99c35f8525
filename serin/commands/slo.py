"""The command `serin slo`: error budgets of the models' objectives, and how fast they burn."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, show, show_json, show_table, when
from serin.errors import NotFound
from serin.machine import environment

if TYPE_CHECKING:
    from serin.monitoring.objectives.read import ObjectivesView, ObjectiveView


_GONE = {300: "5 min", 3_600: "1 h", 21_600: "6 h", 259_200: "3 days"}


def register(app: typer.Typer) -> None:
    app.command()(slo)


def slo(
    model: Annotated[str | None, typer.Argument(help="One model. [default: all]", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show each model's objectives: the error budget of 30 days that is left, and how fast it burns.

    At a burn rate of 1 the budget lasts exactly 30 days. An alert needs two windows: 14.4 in 5 min and 1 h, 6 in 30 min
    and 6 h (both are pages), or 1 in 6 h and 3 days (a ticket).
    """
    from serin.monitoring.history.read import models_with_history
    from serin.monitoring.objectives.read import read_objectives

    home = environment.home()
    known = models_with_history(home)
    views = [view for name in (known if model is None else [model]) if (view := read_objectives(home, name))]
    if model is not None and not views:
        raise NotFound(kind="history of model", name=model, known=known)
    if as_json:
        show_json([dataclasses.asdict(view) for view in views])
        return
    columns = (
        "model",
        "objective",
        "target",
        "requests",
        "bad",
        "budget left",
        "5 min",
        "1 h",
        "30 min",
        "6 h",
        "3 days",
        "",
    )
    rows = [_row(view, each) for view in views for each in view.objectives]
    show_table(columns, rows, empty="no requests yet")
    for view in views:
        if any(view.gone.values()):
            shares = ", ".join(f"{view.gone[window]:.1%} in {name}" for window, name in _GONE.items())
            show(f"{view.model}: clients that left before an answer, which counts for no objective: {shares}")
        for each in view.rollbacks:
            outcome = "" if each.accepted else f" (not done: {each.outcome or 'no answer yet'})"
            show(
                f"{when(each.t)}  {view.model}: automatic rollback from version {each.from_version} to "
                f"{each.to_version}{outcome}: {each.why}"
            )


def _row(view: ObjectivesView, each: ObjectiveView) -> list[object]:
    burns = {window.window_s: f"{window.burn:.2f}" for window in each.windows}
    limit = "" if each.limit_ms is None else f" (< {each.limit_ms:g} ms)"
    left = None if each.budget_left is None else f"{each.budget_left:.1%}"
    return [
        view.model,
        f"{each.name}{limit}",
        f"{each.target:.5g}",
        f"{each.requests:,}",
        f"{each.bad:,}",
        left,
        *(burns[window] for window in (300, 3_600, 1_800, 21_600, 259_200)),
        "BURNS TOO FAST" if each.fires else "",
    ]
