"""`serin captures forget`: deletes recorded rows, and shows which hosts have done it where they share a store."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.arguments import DurationOption, Yes
from serin.commands.output import Json, confirm, counted, say, show, show_json, show_table, when
from serin.errors import SpecError
from serin.machine import environment

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from serin.monitoring.capture.shared_read import SharedRecords
    from serin.watcher.captures import ForgetState


def forget_captures(
    model: Annotated[str, typer.Argument(help="The model's name.")],
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
    from serin.watcher.captures import forget_rows, record_all

    record_all(home, model)
    if model not in models_captured(home):
        raise not_recorded(model)
    if not yes and (rows := forget_rows(home, model, where, remove=False).rows):
        confirm(f"Delete {counted(rows, 'recorded row')} of {model} and their labels?", yes=False)
    found = forget_rows(
        home, model, where, remove=True
    )  # without rows, too: a deletion may have been interrupted
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
    from serin.watcher.captures import ask_to_forget, check_request, wait_until_forgotten

    check_request(home, shared, model, where)
    confirm(f"Delete the recorded rows of {model} on all hosts where {where}, and their labels?", yes=yes)
    request = ask_to_forget(shared, model, where)

    def waiting(hosts: Iterable[str]) -> None:
        say(f"request {request.seq} is stored; waiting up to {wait:g} s for {', '.join(hosts)}")

    state = wait_until_forgotten(shared, request, wait, on_wait=waiting)
    _show([state], as_json=as_json)


def _show_states(model: str, shared: SharedRecords | None, *, as_json: bool) -> None:
    from serin.commands.recording import check_model
    from serin.watcher.captures import forget_states

    if shared is None:
        check_model(model)
        problem = "is missing: name the rows to delete (no hosts share records of this model)"
        raise SpecError(where="--where", problems=[("", problem)])
    _show(forget_states(shared, model), as_json=as_json)


def _show(states: list[ForgetState], *, as_json: bool) -> None:
    if as_json:
        show_json([state.to_json() for state in states])
        return
    rows = [row for state in states for row in _rows(state)]
    columns = ("request", "where", "host", "state", "rows", "files", "labels")
    show_table(columns, rows, empty="nothing was asked to be deleted so far")


def _rows(state: ForgetState) -> list[tuple[object, ...]]:
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
