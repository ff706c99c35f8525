"""`serin events`: what online windows are computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands.arguments import Commands, Model, ModelVersion, Yes, add_group, open_store
from serin.commands.output import Json, confirm, counted, say, show, show_json, show_table
from serin.machine import environment
from serin.machine.hardware import human_bytes

if TYPE_CHECKING:
    from serin.formats.windows import WindowPlan


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "push": push_events,
        "backfill": backfill_events,
        "show": show_events,
        "forget": forget_events,
    }
    add_group(app, "events", "Events that online windows are computed from.", commands)


def push_events(
    name: ModelVersion,
    file: Annotated[
        Path, typer.Argument(help="Events: .parquet, .csv or .jsonl.", exists=True, dir_okay=False)
    ],
    as_json: Json = False,
) -> None:
    """Count the events of a file, as if they arrived now, in the windows of a version. [default: the one that is
    served, else the newest]
    """
    from serin.host.windows import served_plan
    from serin.pipeline.events import file_events, plan_of

    bundle, outcomes = open_store().find(name), Counter[str]()
    served = served_plan(environment.home(), bundle.model) if name == bundle.model else None
    plan = served or plan_of(bundle)
    _send(bundle.model, plan, file_events(plan, file, bundle, outcomes), outcomes, as_json)


def backfill_events(name: ModelVersion, as_json: Json = False) -> None:
    """Count the newest events of the training table, each at its time, so that a version starts warm.

    Run it before the version is rolled out: an event that is older than one that was counted is late. They count in the
    windows of this version: those of the live one, where they are defined alike, and no others. [default: the newest]
    """
    from serin.pipeline.events import plan_of, training_events

    bundle = open_store().find(name)
    plan = plan_of(bundle)
    _send(bundle.model, plan, training_events(plan, bundle), Counter(), as_json)


def _send(
    model: str, plan: WindowPlan, batches: Iterator[dict[str, Any]], outcomes: Counter[str], as_json: bool
) -> None:
    from serin.host.state import running_stack
    from serin.host.windows import begin_windows, send_history

    home = environment.home()
    running_stack(home)
    begin_windows(home)
    for batch in batches:
        outcomes.update(send_history(home, model, plan, batch))
    if as_json:
        show_json(outcomes)
    else:
        show(_described(outcomes))


def _described(outcomes: Mapping[str, int]) -> str:
    parts = [f"{count:,} {name}" for name, count in sorted(outcomes.items())]
    return f"events, once for each window: {', '.join(parts)}" if parts else "no events"


def show_events(as_json: Json = False) -> None:
    """Show how many keys and bytes are kept, and how many events of each model were counted or refused."""
    from serin.host.windows import ask_windows

    found = ask_windows(environment.home(), "/status")
    if as_json:
        show_json(found)
        return
    if "problem" in found:
        say(found["problem"])
    else:
        show(f"{counted(found['keys'], 'key')}, {human_bytes(found['bytes'])}")
    rows = [
        (model, *item) for model, outcomes in found["models"].items() for item in sorted(outcomes.items())
    ]
    show_table(("model", "outcome", "events"), rows, empty="no events since the start")


def forget_events(
    model: Model,
    keys: Annotated[list[str], typer.Argument(metavar="COLUMN=VALUE...", help="The key of the events.")],
    yes: Yes = False,
) -> None:
    """Delete all kept events of one key, in the windows of all versions that are by exactly these columns."""
    from serin.host.windows import forget_keys, served_plan
    from serin.pipeline.events import plan_of, read_key
    from serin.watcher.event_keys import known_plans

    home, store = environment.home(), open_store()
    plan = served_plan(home, model) or plan_of(store.find(model))
    rows = read_key(plan, keys)
    confirm(f"delete the events of {', '.join(keys)}?", yes=yes)
    dropped = sum(forget_keys(home, model, each, rows) for each in known_plans(home, store, model))
    show(f"deleted the events of {counted(dropped, 'key')} (one for each window)")
    for key in plan.keys:
        if {*key} != rows.keys():
            say(f"windows by {', '.join(key)} are not by this key: their events stay")
