"""The command `serin drift`: whether live traffic still looks like the training rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, counted, show, show_json, show_table, when, write_file
from serin.errors import NotWatched
from serin.machine import environment

if TYPE_CHECKING:
    from serin.reports.drift_page import BinView, ColumnView, DriftView

_SHOWN = 15


def register(app: typer.Typer) -> None:
    app.command()(drift)


def drift(
    model: Annotated[str, typer.Argument(help="The model's name.")],
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
    from serin.store.store import Store
    from serin.watcher.served import served_models

    status = next((each for each in served_models(environment.home()) if each.name == model), None)
    if status is None or status.live is None:
        return "no version of it is served here"
    bundle = Path(Store.open().bundle(model, status.live).path)
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
