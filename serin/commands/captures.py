"""`serin captures`: list recorded requests, show or export them. Of all hosts, where they share a store."""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.arguments import ModelVersion, numbered
from serin.commands.forget_captures import forget_captures
from serin.commands.output import Json, counted, human_bytes, say, show, show_json, show_problems, show_table
from serin.errors import NotFound, StoreUnreachable
from serin.machine import environment

if TYPE_CHECKING:
    from serin.monitoring.capture.all_hosts import AllHosts
    from serin.monitoring.capture.counters import CapturesView, ReleaseCounts
    from serin.monitoring.capture.shared_read import SharedRecords

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Recorded requests.", no_args_is_help=True)
    group.command("list")(list_captures)
    group.command("show")(show_captures)
    group.command("export")(export_captures)
    group.command("forget")(forget_captures)
    app.add_typer(group, name="captures")


def list_captures(
    model: Annotated[str | None, typer.Argument(help="Only this model. [default: all]")] = None,
    as_json: Json = False,
) -> None:
    """List the records of each model and version: hours, rows, size, share, recorded and dropped requests."""
    from serin.commands.recording import check_model, known_models
    from serin.machine.contained import contained
    from serin.monitoring.capture.counters import CapturesView, models_captured
    from serin.watcher.captures import all_hosts

    home, shared = environment.home(), _shared()
    known = {*models_captured(home), *(shared.models() if shared else ())}
    if model is not None and model not in known:
        check_model(model)
    views, failed = list[CapturesView](), dict[str, str]()
    for name in sorted(known) if model is None else [model]:
        with contained(failed, name):
            views += all_hosts(home, shared, name).views()
    if as_json:
        show_json([dataclasses.asdict(view) for view in views])
        show_problems(failed)
        return
    columns = ["model", "version", "hours", "first", "last", "rows", "size", "share", "requests", "dropped"]
    hosts = any(view.host for view in views)
    rows = [(*row, view.host) if hosts else row for view in views for row in _rows(view)]
    why = "" if rows else _none(known_models() if model is None else [model])
    show_table([*columns, "host"] if hosts else columns, rows, empty=why)
    for view in views:
        if view.lost_rows:
            lost = counted(view.lost_rows, "row")
            say(f"{view.host or 'this host'} deleted {lost} of {view.model} before they could be uploaded")
    show_problems(failed)


def _shared() -> SharedRecords | None:
    """The records that hosts share; None where they do not, and when the store does not answer."""
    from serin.watcher.captures import shared_records

    try:
        found = shared_records(environment.home())
        return found if found is not None and found.models() else None
    except StoreUnreachable as error:
        say(f"warning: only the records of this host are read: {error}")
        return None


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
    name: ModelVersion,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="The newest rows to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the rows that were recorded last, as CSV or JSON. [default: of all versions]"""
    import pyarrow.csv as pacsv

    from serin.formats.rows import flat

    model, version = numbered(name)
    table = _found(model, version, _shared()).newest(rows, version=version)
    if as_json:
        show_json(table.to_pylist())
    else:
        sys.stdout.flush()
        pacsv.write_csv(flat(table), sys.stdout.buffer)


def export_captures(
    name: ModelVersion,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .parquet, .csv or .jsonl.")],
    since: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, metavar="TIME", help="Only rows that arrived from then on, UTC."),
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, metavar="TIME", help="Only rows that arrived before then, UTC."),
    ] = None,
) -> None:
    """Write recorded rows to a file. [default: of all versions]

    Where hosts share a store, it must answer: no host is left out.
    """
    from serin.formats.rows import write_rows
    from serin.watcher.captures import shared_records

    model, version = numbered(name)
    found = _found(model, version, shared_records(environment.home()))
    first, last = (None if each is None else each.replace(tzinfo=UTC).timestamp() for each in (since, until))
    count = 0
    with write_rows(out) as writer:
        for table in found.tables(version=version, since=first, until=last):
            writer.write_table(table)
            count += table.num_rows
    show(f"{counted(count, 'row')} in {out}" if count else "no rows were recorded then; no file was written")


def _found(model: str, version: int | None, shared: SharedRecords | None) -> AllHosts:
    """The records of a model. NotFound, or NotRecorded, when there are none."""
    from serin.commands.recording import not_recorded
    from serin.monitoring.capture.counters import models_captured
    from serin.watcher.captures import all_hosts

    found = all_hosts(environment.home(), shared, model)
    if not found.versions and model not in models_captured(environment.home()):
        raise not_recorded(model)
    if version is not None and version not in found.versions:
        known = [str(each) for each in found.versions]
        raise NotFound(kind=f"recorded version of {model!r}:", name=str(version), known=known)
    return found
