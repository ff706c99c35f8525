"""`serin lookups`: the tables that live models look columns up in: how old they are, and newer ones in their place."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer

from serin.commands.arguments import Commands, Model, Why, add_group, open_store
from serin.commands.output import Json, show, show_json, show_table, when
from serin.errors import NotFound
from serin.machine import environment

MaxRowChange = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="The largest allowed relative change of a table's rows. [default: lookup.max_row_change of the spec]",
        show_default=False,
    ),
]
Canary = Annotated[
    bool, typer.Option("--canary", help="Shift traffic by the steps of the spec instead of all at once.")
]
Follow = Annotated[bool, typer.Option(help="Wait until the edition is live.")]


def register(app: typer.Typer) -> None:
    commands: Commands = {"show": show_lookups, "refresh": refresh}
    add_group(app, "lookups", "The tables that live models look columns up in.", commands)


def show_lookups(model: Model, as_json: Json = False) -> None:
    """Show the editions of the live version's lookups: rows, and when their tables were read."""
    from serin.pipeline.lookups import edition_tables, live_release

    store = open_store()
    live = live_release(store, model)
    found = edition_tables(store, live, time.time())
    if not found:
        raise NotFound(kind="lookups of", name=live.name, known=[])
    if as_json:
        show_json(
            [
                {
                    "release": each.release.name,
                    "edition": each.release.edition,
                    "live": each.live,
                    **dataclasses.asdict(each.age),
                    "too_old": each.too_old,
                }
                for each in found
            ]
        )
        return
    rows = [
        (
            each.release.name,
            "live" if each.live else "",
            each.age.table,
            f"{each.age.rows:,}",
            when(each.age.read),
            "too old" if each.live and each.too_old else "",
        )
        for each in found
    ]
    show_table(("release", "alias", "table", "rows", "read", "age"), rows, empty="")


def refresh(
    model: Model,
    max_row_change: MaxRowChange = None,
    canary: Canary = False,
    follow: Follow = True,
    why: Why = "",
) -> None:
    """Read the tables of the live version's lookups again, and switch to an edition with them.

    Nothing is trained. The edition must pass the checks of the spec and answer its golden rows before it gets traffic;
    else what is live stays. `serin rollout rollback MODEL` returns to the edition before.
    """
    from serin.host.state import running_stack
    from serin.pipeline.lookups import refresh_lookups
    from serin.rollout.run.access import find_rollouts

    if find_rollouts().log is not None:  # one machine's
        running_stack(environment.home())  # raises NotUp: nobody would switch
    found = refresh_lookups(model, max_row_change=max_row_change, canary=canary, follow=follow, why=why)
    if not found.ran:
        show(f"{found.why}; {found.value.name} stays live")
    elif follow:
        show(f"{found.value.name} is live; `serin rollout rollback {model}` returns to the one before")
    else:
        show(f"{found.value.name} is being rolled out; `serin rollout watch {model}` follows it")
