"""What the watcher has found: `serin drift` compares live traffic with the training rows, `serin slo` shows error
budgets and how fast they burn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.arguments import Model, open_store
from serin.commands.output import Json, counted, show, show_json, show_table, when, write_file
from serin.errors import NotFound, NotWatched
from serin.machine import environment

if TYPE_CHECKING:
    from serin.monitoring.objectives.read import ObjectivesView, ObjectiveView
    from serin.reports.drift_page import BinView, ColumnView, DriftView

_SHOWN = 15
_GONE = {300: "5 min", 3_600: "1 h", 21_600: "6 h", 259_200: "3 days"}


def register(app: typer.Typer) -> None:
    for command in (slo, drift):
        app.command()(command)


def drift(
    model: Model,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write a page with every distribution to this file.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare live traffic with the training rows: alarms, and how close each column is to one.

    A column has drifted once there is enough evidence that a share differs from training by more than its tolerance.
    Shares are judged in blocks of time (column `judged`). The evidence multiplies with each block, so it is near 0%
    until shortly before an alarm. Shares of the last day alone decide nothing: a few rows differ by chance.
    """
    from serin.commands.recording import check_model
    from serin.monitoring.drift.read import read_drift
    from serin.reports.drift_page import drift2html

    view = read_drift(environment.home(), model)
    if view is None:
        check_model(model)
        raise NotWatched(model=model, reason=_why_not(model))
    if report is not None:
        write_file(report, drift2html(view))
    if as_json:
        show_json(dataclasses.asdict(view))
        return
    _show(view)
    if report is not None:
        show(f"written to {report}")


def _show(view: DriftView) -> None:
    from serin.monitoring.retrain import latest_outcome, read_retraining

    since = "no rows yet" if view.first is None else f"{counted(view.rows, 'row')} since {when(view.first)}"
    alarms = "1 false alarm" if view.false_alarms == 1 else f"{view.false_alarms:g} false alarms"
    show(f"{view.release}: {since}; at most {alarms} a year over all columns")
    for alarm in view.alarms:
        show(f"  {alarm.severity}: {alarm.title}")
        show(f"    {alarm.text}")
    if view.alarms and (retraining := latest_outcome(read_retraining(environment.home(), view.model))):
        show(f"  {retraining}")
    columns = (
        "column",
        "state",
        "evidence",
        "importance",
        "most different",
        "training",
        "last day",
        "tolerance",
        "judged",
    )
    show_table(columns, [_row(column) for column in view.columns[:_SHOWN]], empty="no columns are watched")
    if len(view.columns) > _SHOWN:
        show(f"and {len(view.columns) - _SHOWN} more (--report FILE, --json)")


def _row(column: ColumnView) -> tuple[object, ...]:
    from serin.reports.charts import percent

    return (
        column.name,
        column.state,
        None if column.state == "drifted" else percent(column.evidence),
        column.importance_rank,
        *_shares(column.largest),
    )


def _shares(worst: BinView | None) -> tuple[str | None, ...]:
    if worst is None:
        return (None,) * 5
    judged = None if worst.judged is None else f"after {when(worst.judged)}"
    if worst.block in ("10 seconds", "minute"):
        judged = f"every {worst.block}"
    return worst.label, f"{worst.then:.1%}", f"{worst.now:.1%}", f"{worst.tolerance:.1%}", judged


def _why_not(model: str) -> str:
    """Why there is nothing to show, and what to do about it."""
    from serin.commands.recording import why_not_recorded
    from serin.formats.drift import read_drift as read_statistics
    from serin.monitoring.capture.counters import models_captured
    from serin.spec.load import load_spec
    from serin.watcher.served import served_models

    status = next((each for each in served_models(environment.home()) if each.name == model), None)
    if status is None or status.live is None:
        return "no version of it is served here"
    bundle = Path(open_store().bundle(model, status.live).path)
    if not (bundle / "spec.yaml").is_file():
        return f"version {status.live} was imported without a spec"
    monitoring = load_spec(bundle / "spec.yaml").monitoring
    if monitoring.drift is None:
        return f"the spec of version {status.live} has no monitoring.drift; add it and run the pipeline again"
    if read_statistics(bundle) is None:
        return f"version {status.live} has no statistics for drift; export it again (`serin export --fresh`)"
    if model not in models_captured(environment.home()):
        return why_not_recorded(model)
    return "no recorded request was counted yet; is the stack up (`serin status`)?"


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
    rows = [_objective_row(view, each) for view in views for each in view.objectives]
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


def _objective_row(view: ObjectivesView, each: ObjectiveView) -> list[object]:
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
