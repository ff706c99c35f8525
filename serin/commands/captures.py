"""`serin captures`: list recorded requests, show, export or delete them. Of all hosts, where they share a store."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.arguments import (
    Commands,
    DurationOption,
    Model,
    ModelVersion,
    Since,
    Until,
    Yes,
    add_group,
    numbered,
    utc_seconds,
)
from serin.commands.output import (
    Json,
    confirm,
    counted,
    say,
    show,
    show_json,
    show_problems,
    show_table,
    when,
)
from serin.errors import SpecError, StoreUnreachable
from serin.machine import environment
from serin.machine.hardware import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serin.monitoring.capture.all_hosts import SharedRecords
    from serin.monitoring.capture.counters import CapturesView, ReleaseCounts
    from serin.watcher.captures import ForgetState


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_captures,
        "show": show_captures,
        "export": export_captures,
        "forget": forget_captures,
    }
    add_group(app, "captures", "Recorded requests.", commands)


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

    from serin.commands.recording import records_of
    from serin.formats.rows import flat

    model, version = numbered(name)
    table = records_of(model, version, _shared()).newest(rows, version=version)
    if as_json:
        show_json(table.to_pylist())
    else:
        sys.stdout.flush()
        pacsv.write_csv(flat(table), sys.stdout.buffer)


def export_captures(
    name: ModelVersion,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .parquet, .csv or .jsonl.")],
    since: Since = None,
    until: Until = None,
) -> None:
    """Write recorded rows to a file. [default: of all versions]

    Where hosts share a store, it must answer: no host is left out.
    """
    from serin.commands.recording import records_of
    from serin.formats.rows import write_rows
    from serin.watcher.captures import shared_records

    model, version = numbered(name)
    found = records_of(model, version, shared_records(environment.home()))
    first, last = utc_seconds(since), utc_seconds(until)
    count = 0
    with write_rows(out) as writer:
        for table in found.tables(version=version, since=first, until=last):
            writer.write_table(table)
            count += table.num_rows
    show(f"{counted(count, 'row')} in {out}" if count else "no rows were recorded then; no file was written")


def forget_captures(
    model: Model,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help="Rows to delete, as a condition, such as 'passenger_id = 17'. Without it: show which hosts have "
            "done what was asked before, where they share a store.",
        ),
    ] = None,
    wait: Annotated[
        float,
        DurationOption("The longest wait for other hosts, which do it in any case. [default: 1m]", zero=True),
    ] = 60.0,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete recorded rows and their labels for good: those of a person, for example. Waits for rows on their way."""
    from serin.expressions import ExpressionError
    from serin.watcher.captures import shared_records

    home = environment.home()
    shared = shared_records(home)
    if shared is not None and model not in shared.models():
        shared = None
    try:
        if where is None:
            _show_states(model, shared, as_json=as_json)
        elif shared is None:
            _forget_here(home, model, where, yes=yes, as_json=as_json)
        else:
            _forget_everywhere(home, shared, model, where, wait, yes=yes, as_json=as_json)
    except ExpressionError as error:
        raise SpecError(where="--where", problems=[("", str(error))]) from error


def _forget_here(home: Path, model: str, where: str, *, yes: bool, as_json: bool) -> None:
    from serin.commands.recording import not_recorded
    from serin.monitoring.capture.counters import models_captured
    from serin.monitoring.capture.read import column_types
    from serin.watcher.captures import forget_rows, record_all

    record_all(home, model)
    if model not in models_captured(home):
        raise not_recorded(model)
    _say_what_stays(home, model, where, column_types(home, model))
    if not yes and (rows := forget_rows(home, model, where, remove=False).rows):
        confirm(f"Delete {counted(rows, 'recorded row')} of {model} and their labels?", yes=False)
    # Without rows, too: a deletion may have been interrupted.
    found = forget_rows(home, model, where, remove=True)
    if as_json:
        show_json(dataclasses.asdict(found))
        return
    for name in found.unread:
        say(f"some versions do not record the column {name!r}: it counts as null there")
    what = f"{counted(found.rows, 'row')} in {counted(found.files, 'file')}"
    show(f"deleted {what}, and {counted(found.labels, 'label')}")
    if found.leftovers:
        show(
            f"removed {counted(found.leftovers, 'file')} with rows of records that a killed process had left"
        )


def _forget_everywhere(
    home: Path, shared: SharedRecords, model: str, where: str, wait: float, *, yes: bool, as_json: bool
) -> None:
    from serin.watcher.captures import all_hosts, ask_to_forget, check_request, wait_until_forgotten

    check_request(home, shared, model, where)
    _say_what_stays(home, model, where, all_hosts(home, shared, model).columns())
    confirm(f"Delete the recorded rows of {model} on all hosts where {where}, and their labels?", yes=yes)
    request = ask_to_forget(shared, model, where)

    def waiting(hosts: Iterable[str]) -> None:
        say(f"request {request.seq} is stored; waiting up to {wait:g} s for {', '.join(hosts)}")

    state = wait_until_forgotten(shared, request, wait, on_wait=waiting)
    _show_requests([state], as_json=as_json)


def _say_what_stays(home: Path, model: str, where: str, recorded: Iterable[str]) -> None:
    from serin.watcher.event_keys import kept_keys

    for problem in kept_keys(home, model, where, [*recorded]):
        say(problem)


def _show_states(model: str, shared: SharedRecords | None, *, as_json: bool) -> None:
    from serin.commands.recording import check_model
    from serin.watcher.captures import forget_states

    if shared is None:
        check_model(model)
        problem = "is missing: name the rows to delete (no hosts share records of this model)"
        raise SpecError(where="--where", problems=[("", problem)])
    _show_requests(forget_states(shared, model), as_json=as_json)


def _show_requests(states: list[ForgetState], *, as_json: bool) -> None:
    if as_json:
        show_json([state.to_json() for state in states])
        return
    rows = [row for state in states for row in _request_rows(state)]
    columns = ("request", "where", "host", "state", "rows", "files", "labels")
    show_table(columns, rows, empty="nothing was asked to be deleted so far")


def _request_rows(state: ForgetState) -> list[tuple[object, ...]]:
    request, found = state.request, list[tuple[object, ...]]()
    for host, applied in sorted(state.applied.items()):
        done = (
            f"deleted {when(applied.t)}"
            if applied.by == host
            else f"deleted {when(applied.t)} by {applied.by}"
        )
        told = f"FAILED: {applied.problem}" if applied.problem else done
        found.append((request.seq, request.where, host, told, applied.rows, applied.files, applied.labels))
    asked = f"WAITING since {when(request.t)}"
    return found + [(request.seq, request.where, host, asked, None, None, None) for host in state.waiting]
