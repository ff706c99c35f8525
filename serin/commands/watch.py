"""What is known after the release: `serin drift` compares live traffic with the training rows, `serin slo` shows error
budgets and how fast they burn, `serin labels` adds the truth about answers, `serin quality` shows how good they are."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.arguments import Commands, Model, ModelVersion, add_group, open_store
from serin.commands.output import Json, counted, say, show, show_json, show_table, when, write_file
from serin.errors import NotFound, NotRecorded, NotWatched
from serin.machine import environment

if TYPE_CHECKING:
    from serin.formats.gate import Measured
    from serin.monitoring.objectives.read import ObjectivesView, ObjectiveView
    from serin.monitoring.quality.view import Objective, QualityView, ReleaseQuality
    from serin.pipeline.labels import LabelsAdded
    from serin.reports.drift_page import BinView, ColumnView, DriftView

_SHOWN = 15
_GONE = {300: "5 min", 3_600: "1 h", 21_600: "6 h", 259_200: "3 days"}


_SEGMENTS = 20
_ENOUGH = 200  # rows, as for a segment that is shown by itself
_JOINED_LATER = "is joined", "are joined"
_UNKNOWN = "is about no recorded row so far", "are about no recorded row so far"
_AMBIGUOUS = "has a client's id that several requests share", "have a client's id that several requests share"
_UNCLEAR = "names no row of a request with several rows", "name no row of a request with several rows"
_BEYOND = "names a row that its request does not have", "name a row that their request does not have"

LabelTable = Annotated[
    str,
    typer.Argument(
        metavar="FILE|TABLE",
        help="Labels: a Parquet, CSV or JSON lines file, a URL, folder or glob, or a table's name in data.tables.",
    ),
]
Id = Annotated[
    str | None,
    typer.Option("--id", metavar="COLUMN", help="The column with the request's id. [default: _id]"),
]
Row = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column with the row's number in its request, from 0; not needed for requests of one row. "
        "[default: _row]",
    ),
]
ClientId = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column with the client's own id. [default: _client_id]"),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="A request column to join by instead of an id; may be repeated. [default: data.id and data.time, where "
        "they are request columns]",
    ),
]
Value = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column with the target itself. [default: _label, target or label, else it is computed from the "
        "columns of data.target]",
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that says which of two labels for the same row is newer; name it in every call or in none. "
        "[default: the later arrival]",
    ),
]


def register(app: typer.Typer) -> None:
    for command in (slo, drift):
        app.command()(command)
    commands: Commands = {"add": add_labels, "show": show_labels}
    add_group(app, "labels", "The truth about a model's answers, which is known later.", commands)
    app.command("quality")(show_quality)


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
    from serin.watcher.cluster_state import watch_home

    home = watch_home(environment.home(), "watch/drift", "watch/retrain")
    view = read_drift(home, model)
    if view is None:
        check_model(model)
        raise NotWatched(model=model, reason=_why_not(model))
    if report is not None:
        write_file(report, drift2html(view))
    if as_json:
        show_json(dataclasses.asdict(view))
        return
    _show(view, home)
    if report is not None:
        show(f"written to {report}")


def _show(view: DriftView, home: Path) -> None:
    from serin.monitoring.retrain import latest_outcome, read_retraining

    since = "no rows yet" if view.first is None else f"{counted(view.rows, 'row')} since {when(view.first)}"
    alarms = "1 false alarm" if view.false_alarms == 1 else f"{view.false_alarms:g} false alarms"
    show(f"{view.release}: {since}; at most {alarms} a year over all columns")
    for alarm in view.alarms:
        show(f"  {alarm.severity}: {alarm.title}")
        show(f"    {alarm.text}")
    if view.alarms and (retraining := latest_outcome(read_retraining(home, view.model))):
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
    from serin.commands.recording import again_with_it, why_not_recorded
    from serin.formats.drift import read_drift as read_statistics
    from serin.monitoring.capture.counters import models_captured
    from serin.store.packages import stored_spec
    from serin.watcher.served import served_models

    status = next((each for each in served_models(environment.home()) if each.name == model), None)
    if status is None or status.live is None:
        return "no version of it is served here"
    bundle = Path(open_store().bundle(model, status.live).path)
    if not (bundle / "spec.yaml").is_file():
        return f"version {status.live} was imported without a spec"
    monitoring = stored_spec(bundle).monitoring
    if monitoring.drift is None:
        return (
            f"the spec of version {status.live} has no monitoring.drift; add it and {again_with_it(bundle)}"
        )
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
    from serin.watcher.cluster_state import watch_home

    home = watch_home(environment.home(), "history", "watch/objectives", "watch/rollbacks")
    known = models_with_history(home)
    views = [view for name in (known if model is None else [model]) if (view := read_objectives(home, name))]
    if model is not None and model not in known:
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
    show_table(columns, rows, empty="no requests were compared with objectives yet")
    for view in views:
        if any(view.gone.values()):
            shares = ", ".join(f"{view.gone[window]:.1%} in {name}" for window, name in _GONE.items())
            show(f"{view.model}: clients that left before an answer, which counts for no objective: {shares}")
        for each in view.rollbacks:
            outcome = "" if each.accepted else f" (not done: {each.outcome or 'no answer yet'})"
            show(
                f"{when(each.t)}  {view.model}: automatic rollback from version {each.from_label} to "
                f"{each.to_label}{outcome}: {each.why}"
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


def add_labels(
    name: ModelVersion,
    table: LabelTable,
    id_column: Id = None,
    row: Row = None,
    client_id: ClientId = None,
    on: On = None,
    value: Value = None,
    time: Time = None,
    as_json: Json = False,
) -> None:
    """Add labels: targets of a version. [default: the live one, else the newest]

    Late, repeated and corrected labels are normal: of several for one row the newest counts.

    A label is about the request with its id (and row), about the request with the client's id, or about every request
    with the same values in the columns of `--on`. A label whose request is not recorded is kept until it is.
    """
    from serin.commands.predictions import open_bundle
    from serin.monitoring.quality.labels import Columns
    from serin.pipeline.label_tables import read_labels
    from serin.pipeline.labels import truth_of
    from serin.watcher.cluster_state import store_labels

    bundle = open_bundle(name)
    columns = Columns(id=id_column, row=row, client_id=client_id, on=tuple(on or ()), value=value, time=time)
    done = store_labels(bundle, read_labels(table, truth_of(bundle), columns), columns)
    if as_json:
        show_json(dataclasses.asdict(done))
    else:
        _show_added(bundle.model, done, columns.given.get(done.key, done.key))
    if done.mixed:
        say(
            "warning: some labels were added with --time and others without; the latter count as of their arrival. "
            "Name --time in every call, or in none."
        )


def _show_added(model: str, done: LabelsAdded, key: str) -> None:
    if done.stored:
        show(f"{counted(done.stored, 'label')} for {model}, joined by {key}")
    elif done.rows > done.missing + done.without_key:
        show(f"{counted(done.rows, 'row')}, nothing new: the same labels were added before")
    else:
        show(f"{counted(done.rows, 'row')}, and no label that can be used")
    _show_counts(
        (done.joined_later, *_JOINED_LATER, " by the leading watcher; `serin labels show` counts them"),
        (done.matched, "is about a recorded row", "are about a recorded row"),
        (done.unknown, *_UNKNOWN, "; kept until it is recorded"),
        (done.ambiguous, *_AMBIGUOUS, "; not used"),
        (done.unclear, *_UNCLEAR, "; not used"),
        (done.beyond, *_BEYOND, "; not used"),
        (done.missing, "row has no label", "rows have no label"),
        (done.without_key, "row has a null in the key", "rows have a null in the key", "; not used"),
        (done.repeated, "row is replaced", "rows are replaced", " by a later one in the same table"),
    )


def _show_counts(*counts: tuple[int | str, ...]) -> None:
    """Prints a line for each count that is not 0: with its words for one, for several, and those that follow."""
    for number, one, several, *rest in counts:
        if number:
            show(f"  {counted(int(number), str(one), str(several))}{''.join(map(str, rest))}")


def show_labels(model: Model, as_json: Json = False) -> None:
    """Show how many recorded rows have a label, by version and day, and how late labels come."""
    view = _view(model)
    if as_json:
        keys = ("version", "recorded", "labelled", "coverage", "delay_s", "days")
        releases = [{key: entry[key] for key in keys} for entry in view.to_json()["releases"]]
        names = ("received", "unknown", "ambiguous", "unclear", "beyond", "behind")
        show_json({"model": model, **{key: getattr(view, key) for key in names}, "releases": releases})
        return
    behind = ", more are being joined" if view.behind else ""
    show(f"{model}: {counted(view.received, 'label')} received{behind}")
    _show_counts(
        (view.unknown, *_UNKNOWN),
        (view.ambiguous, *_AMBIGUOUS),
        (view.unclear, *_UNCLEAR),
        (view.beyond, *_BEYOND),
    )
    rows = [
        (
            each.version,
            f"{each.recorded:,}",
            f"{each.labelled:,}",
            _share(each.coverage),
            *map(_duration, each.delay_s or (None, None)),
        )
        for each in view.releases
    ]
    columns = ("version", "recorded rows", "with a label", "share", "median delay", "90% within")
    show_table(columns, rows, empty="no rows are recorded")


def show_quality(model: Model, as_json: Json = False) -> None:
    """Show how good a model's answers are, by version: on labelled live rows, on the test rows, and as estimated."""
    view = _view(model)
    if as_json:
        show_json(view.to_json())
        return
    for release in view.releases:
        show(
            f"{release.release}: {release.labelled:,} of {counted(release.recorded, 'recorded row')} "
            f"{'has' if release.recorded == 1 else 'have'} a label ({_share(release.coverage)})"
        )
        names = dict.fromkeys([*release.metrics, *release.offline, *release.estimate])
        rows = [
            (
                name,
                _band(release.metrics.get(name)),
                _band(release.offline.get(name)),
                *_estimate(release, name),
            )
            for name in names
        ]
        columns = ("metric", "live (95%)", "test rows (95%)", "estimate", "error of the estimate")
        show_table(columns, rows, empty="  nothing can be measured yet")
        if few := _few(release):
            show(f"  {few}")
        for segment in release.segments[:_SEGMENTS]:
            name = next(iter(segment.metrics), "")
            then = segment.offline.get(name)
            live = _band(segment.metrics.get(name))
            show(f"  {segment.name}: {counted(segment.rows, 'row')}, {name} {live}, test rows {_band(then)}")
        if release.objective is not None:
            show(f"  {objective_line(release.objective)}")


def _few(release: ReleaseQuality) -> str:
    """A warning about figures of few rows; empty when there are enough."""
    if release.metrics and release.measured_on < _ENOUGH:
        return f"{counted(release.measured_on, 'labelled row')}: live values and errors of estimates say little yet"
    if release.estimate and release.recorded < _ENOUGH:
        return f"{counted(release.recorded, 'recorded row')}: estimates say little yet"
    return ""


def objective_line(objective: Objective) -> str:
    """The quality objective in a sentence."""
    mean = "no labels yet" if objective.mean is None else f"mean {objective.loss_name} {objective.mean:.4f}"
    found = "worse than allowed" if objective.alarm else "no alarm"
    return (
        f"objective: {mean}, at most {objective.limit:.4f} ({objective.offline:.4f} on the test rows): {found}, "
        f"evidence {objective.evidence:.3g} of {objective.threshold:.3g} after {counted(objective.used, 'label')}"
        f"{_judged(objective)}"
    )


def _judged(objective: Objective) -> str:
    if not objective.block:
        return ""
    blocks = f"; {counted(objective.blocks, objective.block)} judged"
    return blocks if objective.judged is None else f"{blocks}, the next after {when(objective.judged)}"


def _view(model: str) -> QualityView:
    from serin.commands.recording import not_recorded
    from serin.monitoring.capture.counters import models_captured
    from serin.monitoring.quality.view import quality_file, read_quality
    from serin.watcher.cluster_state import watch_home

    view = read_quality(watch_home(environment.home(), f"watch/quality/{model}.json"), model)
    if view is not None:
        return view
    if model in models_captured(environment.home()):
        reason = (
            "records and labels are not counted yet: the watcher writes "
            f"{quality_file(environment.home(), model)}; is the stack up (`serin status`)?"
        )
        raise NotRecorded(model=model, reason=reason)
    raise not_recorded(model)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _band(found: Measured | None) -> str:
    if found is None:
        return "-"
    if not math.isfinite(found.low):
        return f"{found.value:.4f}"
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def _estimate(release: ReleaseQuality, name: str) -> tuple[str, str]:
    found = release.estimate.get(name)
    if found is None:
        return "-", "-"
    return f"{found.value:.4f}", "-" if found.error is None else f"{found.error:+.4f}"
