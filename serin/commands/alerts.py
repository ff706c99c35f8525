"""The commands `serin alerts`: what is wrong now, who looks after it, and who is notified."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.arguments import Commands, DurationOption, Why, add_group
from serin.commands.output import Json, say, show, show_json, show_table, when
from serin.machine import environment

if TYPE_CHECKING:
    from pathlib import Path

    from serin.monitoring.alerts.alert import AlertRecord, Silence
    from serin.watcher.cluster_state import HomeBook, SharedBook

Name = Annotated[str, typer.Argument(help="The receiver's name.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Only alerts of this model.", show_default=False)
]


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_alerts,
        "ack": ack,
        "silence": silence,
        "unsilence": unsilence,
        "test": send_test,
    }
    group = add_group(app, "alerts", "Alerts: list, acknowledge, silence, deliver.", commands)
    receivers: Commands = {"add": add_receiver, "list": list_receivers, "remove": remove_receiver}
    add_group(group, "receivers", "Who is notified of alerts.", receivers)


def list_alerts(
    model: ModelOption = None,
    resolved: Annotated[int, typer.Option(min=0, help="Also show so many resolved ones.")] = 0,
    journal: Annotated[int, typer.Option(min=0, help="Also show so many lines of the journal.")] = 0,
    as_json: Json = False,
) -> None:
    """List open alerts, newest first."""
    from serin.monitoring.alerts.book import read_alerts

    home = _home()
    view = read_alerts(home, model, resolved=resolved, lines=journal)
    if as_json:
        show_json({**dataclasses.asdict(view), "receivers": _receiver_states(home)})
        return
    columns = ("since", "severity", "alert", "state", "what")
    rows = [_row(record) for record in (*view.open, *view.resolved)]
    show_table(columns, rows, empty="no open alerts")
    for each in view.silences:
        what = each.pattern if each.pattern is not None else f"all alerts of {each.model}"
        why = f": {each.why}" if each.why else ""
        show(f"silence {each.id}: {what}, until {when(each.until)}, by {each.by}{why}")
    for line in view.journal:
        show(
            f"{when(line.t)}  {line.event} {line.key} by {line.by}{': ' if line.detail else ''}{line.detail}"
        )


def ack(
    key: Annotated[str, typer.Argument(help="The alert, as `serin alerts list` names it.")],
    note: Annotated[str, typer.Option(help="What is being done about it.")] = "",
) -> None:
    """Acknowledge an open alert: others see that you look after it.

    An alert that is acknowledged already is only taken over with a note.
    """
    user = environment.actor()
    before = _book().acknowledge(key, by=user, note=note, now=time.time())
    if before.acknowledged is None:
        show(f"{key} is acknowledged by {user}")
        return
    earlier = f"{_acknowledged(before)} at {when(before.acknowledged)}"
    if note:
        show(f"{key} is acknowledged by {user}; before that it was {earlier}")
    else:
        show(f"{key} is already {earlier}; `--note` takes it over")


def silence(
    pattern: Annotated[
        str | None,
        typer.Argument(help="Alerts to silence, such as 'flights/drift/*'.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Silence all alerts of this model.", show_default=False)
    ] = None,
    lasts: Annotated[float, DurationOption("For how long, such as 30m or 3d. [default: 2h]")] = 7200.0,
    why: Why = "",
) -> None:
    """Notify nobody of some alerts for a time. Alerts that are still open at its end are sent then.

    The watcher's log and Prefect's events are not silenced.
    """
    if (pattern is None) == (model is None):
        raise typer.BadParameter("give either a PATTERN or --model")
    now = time.time()
    made = _book().silence(
        pattern=pattern, model=model, until=now + lasts, by=environment.actor(), why=why, now=now
    )
    show(f"silence {made.id} lasts until {when(made.until)}; `serin alerts unsilence {made.id}` ends it")
    _hint_if_nothing_matches(made, now)


def unsilence(
    number: Annotated[int, typer.Argument(help="The silence, as `serin alerts list` numbers it.")],
) -> None:
    """End a silence before its time."""
    _book().end_silence(number, by=environment.actor(), now=time.time())
    show(f"silence {number} has ended")


def send_test(
    name: Annotated[
        str | None, typer.Argument(help="One receiver. [default: all]", show_default=False)
    ] = None,
) -> None:
    """Send a test message to receivers now. Exit code 1 when one of them does not accept it."""
    from serin.errors import NotFound
    from serin.monitoring.alerts.delivery import try_receiver
    from serin.monitoring.alerts.receivers import ReceiverFile

    known = ReceiverFile(_home()).read()
    chosen = [each for each in known if name in (None, each.name)]
    if name is not None and not chosen:
        raise NotFound(kind="receiver", name=name, known=[each.name for each in known])
    if not chosen:
        say("no receivers yet: `serin alerts receivers add NAME` adds one")
    problems = {each.name: try_receiver(each) for each in chosen}
    for receiver, problem in problems.items():
        show(f"{receiver}: {'accepted' if problem is None else problem}")
    if any(problem is not None for problem in problems.values()):
        raise typer.Exit(1)


def add_receiver(
    name: Name,
    url: Annotated[
        str | None,
        typer.Argument(
            help="Its URL. Others on this machine can read arguments: a secret one is better given in the "
            "environment (SERIN_RECEIVER_URL) or on standard input. [default: from there]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Add a receiver: a webhook (http, https), or anything that apprise knows (mailtos://, slack://, ...)."""
    from serin.monitoring.alerts.delivery import channel_of
    from serin.monitoring.alerts.receivers import valid_receiver

    secret = url or environment.text("SERIN_RECEIVER_URL") or _url_from_stdin()
    channel_of(valid_receiver(name, secret))  # refuses what cannot be used, before it is stored
    added = _book().add_receiver(name, secret)
    show(f"{name} ({added.shown}) gets alerts from now on; `serin alerts test {name}` sends a test message")


def list_receivers(as_json: Json = False) -> None:
    """List receivers and the outcome of their messages. URLs are shown without their secrets."""
    states = _receiver_states(_home())
    if as_json:
        show_json(states)
        return
    columns = ("name", "url", "sent", "pending", "failed attempts", "given up", "dropped", "last problem")
    keys = ("name", "url", "sent", "pending", "failed_attempts", "given_up", "dropped", "problem")
    show_table(columns, [[state[key] for key in keys] for state in states], empty="no receivers yet")


def remove_receiver(name: Name) -> None:
    """Remove a receiver. Messages that wait for it are not sent."""
    _book().remove_receiver(name)
    show(f"{name} is removed")


def _book() -> SharedBook | HomeBook:
    from serin.watcher.cluster_state import find_book

    return find_book(environment.home())


def _home() -> Path:
    from serin.watcher.cluster_state import watch_home

    return watch_home(environment.home(), "alerts")


def _receiver_states(home: Path) -> list[dict[str, Any]]:
    from serin.monitoring.alerts.book import read_alerts
    from serin.monitoring.alerts.receivers import ReceiverFile

    urls: dict[str, str] = {each.name: each.shown for each in ReceiverFile(home).read()}
    counted = {each.name: dataclasses.asdict(each) for each in read_alerts(home, resolved=0).receivers}
    empty = {"pending": 0, "sent": 0, "failed_attempts": 0, "given_up": 0, "dropped": 0, "problem": None}
    names = [*urls, *(name for name in counted if name in ("log", "prefect"))]
    return [{"name": name, "url": urls.get(name, "built in"), **counted.get(name, empty)} for name in names]


def _row(record: AlertRecord) -> tuple[object, ...]:
    alert = record.alert
    return when(alert.since), alert.severity, alert.key, _state(record), alert.title


def _state(record: AlertRecord) -> str:
    if record.resolved is not None:
        return f"{record.ended} {when(record.resolved)}"
    parts = []
    if record.acknowledged_by is not None:
        parts.append(_acknowledged(record))
    if record.silenced_until is not None:
        parts.append(f"silenced until {when(record.silenced_until)}")
    return ", ".join(parts) or "open"


def _acknowledged(record: AlertRecord) -> str:
    note = f" ({record.note})" if record.note else ""
    return f"acknowledged by {record.acknowledged_by}{note}"


def _hint_if_nothing_matches(made: Silence, now: float) -> None:
    """A silence may be made before its model is served, so one that matches nothing is not refused."""
    from serin.monitoring.alerts.book import read_alerts
    from serin.rollout.run.access import find_rollouts

    served = find_rollouts().models()
    alerts = (record.alert for record in read_alerts(_home(), resolved=0).open)
    if made.may_cover(served) or any(made.covers(alert.key, alert.model, now) for alert in alerts):
        return
    what = repr(made.model if made.pattern is None else made.pattern)
    known = ", ".join(served) or "none"
    say(f"note: {what} matches no open alert and no model that was ever served here (models: {known})")


def _url_from_stdin() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("URL", hide_input=True, err=True))
    return sys.stdin.readline().strip()
