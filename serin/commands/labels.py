"""`serin labels`: add the truth about answers that were given, and show how many answers have one."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, show, show_json, show_table
from serin.errors import NotFound
from serin.machine import environment

if TYPE_CHECKING:
    from serin.formats.groups import Measured
    from serin.monitoring.quality.view import Objective, QualityView, ReleaseQuality
    from serin.pipeline.labels import LabelsAdded

_SEGMENTS = 20

Model = Annotated[str, typer.Argument(help="The model's name.")]
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
        help="A request column to join by instead of an id; may be repeated. [default: data.id and data.time]",
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
        help="The column that says which of two labels for the same row is newer. [default: the later arrival]",
    ),
]
Version = Annotated[
    str, typer.Option(help="The version whose target the labels are. [default: live, else the newest]")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The truth about a model's answers, which is known later.", no_args_is_help=True)
    group.command("add")(add_labels)
    group.command("show")(show_labels)
    app.add_typer(group, name="labels")
    app.command("quality")(show_quality)


def add_labels(
    model: Model,
    table: LabelTable,
    id_column: Id = None,
    row: Row = None,
    client_id: ClientId = None,
    on: On = None,
    value: Value = None,
    time: Time = None,
    version: Version = "",
    as_json: Json = False,
) -> None:
    """Add labels. Late, repeated and corrected ones are normal: of several for one row the newest counts.

    A label is about the request with its id (and row), about the request with the client's id, or about every request
    with the same values in the columns of `--on`. A label whose request is not recorded is kept until it is.
    """
    from serin.commands.predictions import open_bundle
    from serin.monitoring.quality.labels import Columns
    from serin.pipeline.label_tables import read_labels
    from serin.pipeline.labels import add, truth_of

    bundle = open_bundle(model, version)
    columns = Columns(id=id_column, row=row, client_id=client_id, on=tuple(on or ()), value=value, time=time)
    done = add(bundle, read_labels(table, truth_of(bundle), columns), columns)
    if as_json:
        show_json(dataclasses.asdict(done))
    else:
        _show(model, done)


def _show(model: str, done: LabelsAdded) -> None:
    if not done.stored:
        show(f"{done.rows:,} rows, nothing new: the same labels were added before")
    else:
        show(f"{done.stored:,} labels for {model}, joined by {done.key}")
    for count, what in (
        (done.matched, "are about a recorded row"),
        (done.unknown, "are about no recorded row so far; they are kept and joined when it is recorded"),
        (done.ambiguous, "have a client's id that several requests share, and are not used"),
        (done.unclear, "name no row of a request with several rows, and are not used"),
        (done.missing, "rows have no label"),
        (done.without_key, "rows have a null in the key, and are not used"),
        (done.repeated, "rows are replaced by a later one in the same table"),
    ):
        if count:
            show(f"  {count:,} {what}")


def show_labels(model: Model, as_json: Json = False) -> None:
    """Show how many recorded rows have a label, by version and day, and how late labels come."""
    view = _view(model)
    if as_json:
        keys = ("version", "recorded", "labelled", "coverage", "delay_s", "days")
        releases = [{key: entry[key] for key in keys} for entry in view.to_json()["releases"]]
        counts = {
            key: getattr(view, key) for key in ("received", "unknown", "ambiguous", "unclear", "behind")
        }
        show_json({"model": model, **counts, "releases": releases})
        return
    show(f"{model}: {view.received:,} labels received{', more are being joined' if view.behind else ''}")
    for count, what in (
        (view.unknown, "are about no recorded row so far"),
        (view.ambiguous, "have a client's id that several requests share"),
        (view.unclear, "name no row of a request with several rows"),
    ):
        if count:
            show(f"  {count:,} {what}")
    rows = [
        (
            each.version,
            f"{each.recorded:,}",
            f"{each.labelled:,}",
            _share(each.coverage),
            *_delays(each.delay_s),
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
            f"{release.release}: {release.labelled:,} of {release.recorded:,} recorded rows have a label "
            f"({_share(release.coverage)})"
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
        for segment in release.segments[:_SEGMENTS]:
            name = next(iter(segment.metrics), "")
            then = segment.offline.get(name)
            live = _band(segment.metrics.get(name))
            show(f"  {segment.name}: {segment.rows:,} rows, {name} {live}, test rows {_band(then)}")
        if release.objective is not None:
            show(f"  {objective_line(release.objective)}")


def objective_line(objective: Objective) -> str:
    """The quality objective in a sentence."""
    mean = "no labels yet" if objective.mean is None else f"mean {objective.loss_name} {objective.mean:.4f}"
    found = "worse than allowed" if objective.alarm else "no alarm"
    return (
        f"objective: {mean}, at most {objective.limit:.4f} ({objective.offline:.4f} on the test rows): {found}, "
        f"evidence {objective.evidence:.3g} of {objective.threshold:.3g} after {objective.used:,} labels"
    )


def _view(model: str) -> QualityView:
    from serin.monitoring.quality.view import read_quality

    view = read_quality(environment.home(), model)
    if view is None:
        raise NotFound(kind="recorded rows or labels of the model", name=model)
    return view


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _delays(delay: tuple[float, float] | None) -> tuple[str, str]:
    return ("-", "-") if delay is None else (_duration(delay[0]), _duration(delay[1]))


def _duration(seconds: float) -> str:
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
