"""`serin tables`: tables of this machine for workers on other machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serin.commands.arguments import Commands, Yes, add_group
from serin.commands.output import Json, confirm, show, show_json, show_table, when
from serin.machine.hardware import human_bytes


def register(app: typer.Typer) -> None:
    commands: Commands = {"push": push, "list": list_pushed, "remove": remove}
    add_group(app, "tables", "Tables of this machine, for workers on other machines.", commands)


def push(
    folder: Annotated[Path, typer.Argument(help="A folder with tables.")],
    as_json: Json = False,
) -> None:
    """Put a folder of tables into the store (SERIN_STORE), once: the same files have the same URL.

    Prints what to write under data.tables of the spec.
    """
    from serin.pipeline.tables import push_tables

    pushed = push_tables(folder)
    if as_json:
        show_json({"tables": pushed.urls, "bytes": pushed.size, "sent": pushed.sent})
        return
    for name in pushed.left_out:
        show(f"not sent: {name} (hidden, a link to elsewhere, package.json, or it looks like a secret)")
    size = human_bytes(pushed.size)
    show(f"sent {size}" if pushed.sent else f"the store has these {size} already; nothing was sent")
    show("in the spec:\n  data:\n    tables:")
    for name, url in pushed.urls.items():
        show(f"      {Path(name).stem.lower().replace('-', '_')}: {url}")


def list_pushed(as_json: Json = False) -> None:
    """The folders of tables that were pushed to the store, newest first."""
    from serin.pipeline.tables import list_tables

    found = list_tables()
    if as_json:
        show_json([asdict(each) for each in found])
        return
    rows = [
        (each.digest[:12], when(each.pushed), human_bytes(each.size), ", ".join(each.urls)) for each in found
    ]
    show_table(("tables", "pushed", "size", "files"), rows, empty="none; `serin tables push FOLDER`")


def remove(
    tables: Annotated[str, typer.Argument(help="A pushed folder, as `serin tables list` shows it.")],
    yes: Yes = False,
) -> None:
    """Remove a folder of tables from the store, unless a package or a version names it."""
    from serin.pipeline.tables import remove_tables

    confirm(f"Remove the tables {tables} from the store?", yes=yes)
    going = remove_tables(tables)
    show(f"removed {going.digest[:12]}, {human_bytes(going.size)}")
