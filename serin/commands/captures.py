"""`serin captures`: list recorded requests, show some of them, and delete rows."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.output import Json, confirm, counted, human_bytes, say, show, show_json, show_table
from serin.errors import NotFound, SpecError
from serin.machine import environment

if TYPE_CHECKING:
    from serin.monitoring.capture.counters import CapturesView, ReleaseCounts

Model = Annotated[str, typer.Argument(help="The model's name.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Recorded requests.", no_args_is_help=True)
    group.command("list")(list_captures)
    group.command("show")(show_captures)
    group.command("forget")(forget_captures)
    app.add_typer(group, name="captures")


def list_captures(
    model: Annotated[str | None, typer.Argument(help="Only this model. [default: all]")] = None,
    as_json: Json = False,
) -> None:
    """List the records of each model and version: hours, rows, size, share, recorded and dropped requests."""
    from serin.commands.recording import check_model, known_models
    from serin.monitoring.capture.counters import models_captured, read_captures

    home = environment.home()
    if model is not None:
        check_model(model)
    chosen = models_captured(home) if model is None else [model]
    views = [view for name in chosen if (view := read_captures(home, name)) is not None]
    if as_json:
        show_json([dataclasses.asdict(view) for view in views])
        return
    rows = [row for view in views for row in _rows(view)]
    columns = ("model", "version", "hours", "first", "last", "rows", "size", "share", "requests", "dropped")
    show_table(columns, rows, empty="" if rows else _none(known_models() if model is None else [model]))


def _none(models: list[str]) -> str:
    """Why no model has records, one line each."""
    from serin.commands.recording import why_not_recorded

    lines = [f"  {model}: {why_not_recorded(model)}" for model in models]
    return "\n".join(["no recorded requests", *(lines or ["  there is no model yet; `serin run` makes one"])])


def _rows(view: CapturesView) -> list[tuple[Any, ...]]:
    """One row for each version: what is kept now, then share, recorded and dropped requests since its release."""
    from serin.store.artifacts import Release

    kept = {each.version: each for each in view.versions}
    counted: dict[int, list[ReleaseCounts]] = {}
    for name, counts in view.releases.items():
        counted.setdefault(Release.parse(name).version, []).append(counts)
    rows = []
    for version in sorted(kept.keys() | counted.keys()):
        here, totals = kept.get(version), counted.get(version, [])
        place: tuple[Any, ...] = (0, None, None, 0, human_bytes(0))
        if here is not None:
            place = here.hours, here.first_hour, here.last_hour, f"{here.rows:,}", human_bytes(here.bytes)
        share = f"{max(each.share for each in totals):.0%}" if totals else None
        requests, dropped = sum(each.requests for each in totals), sum(each.dropped for each in totals)
        rows.append((view.model, version, *place, share, f"{requests:,}", f"{dropped:,}"))
    return rows


def show_captures(
    model: Model,
    version: Annotated[int | None, typer.Option(help="Only this version. [default: all]")] = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="The newest rows to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the rows that were recorded last, as CSV or JSON."""
    import pyarrow.csv as pacsv

    from serin.commands.recording import not_recorded
    from serin.formats.captures import versions_captured
    from serin.formats.rows import flat
    from serin.monitoring.capture.counters import models_captured
    from serin.monitoring.capture.read import newest

    home = environment.home()
    if model not in models_captured(home):
        raise not_recorded(model)
    kept = [str(each) for each in versions_captured(home, model)]
    if version is not None and str(version) not in kept:
        raise NotFound(kind=f"recorded version of {model!r}:", name=str(version), known=kept)
    table = newest(home, model, rows, version=version)
    if as_json:
        show_json(table.to_pylist())
    else:
        sys.stdout.flush()
        pacsv.write_csv(flat(table), sys.stdout.buffer)


def forget_captures(
    model: Model,
    where: Annotated[
        str, typer.Option("--where", help="Rows to delete, as a condition, such as 'passenger_id = 17'.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete recorded rows and their labels for good: those of a person, for example. Waits for rows on their way."""
    from serin.commands.recording import not_recorded
    from serin.expressions import ExpressionError
    from serin.monitoring.capture.counters import models_captured
    from serin.stack.captures import forget_rows, record_all

    home = environment.home()
    record_all(home, model)
    if model not in models_captured(home):
        raise not_recorded(model)
    try:
        found = forget_rows(home, model, where, remove=yes)
        if found.rows and not yes:
            confirm(f"Delete {counted(found.rows, 'recorded row')} of {model} and their labels?", yes=False)
            found = forget_rows(home, model, where, remove=True)
    except ExpressionError as error:
        raise SpecError(where="--where", problems=[("", str(error))]) from error
    if as_json:
        show_json(dataclasses.asdict(found))
        return
    for name in found.unread:
        say(f"some versions do not record the column {name!r}: it counts as null there")
    what = f"{counted(found.rows, 'row')} in {counted(found.files, 'file')}"
    show(f"deleted {what}, and {counted(found.labels, 'label')}")
