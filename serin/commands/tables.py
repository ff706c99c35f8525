"""`serin tables`: tables of this machine for workers on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serin.commands.arguments import add_group
from serin.commands.output import Json, human_bytes, show, show_json


def register(app: typer.Typer) -> None:
    add_group(app, "tables", "Tables of this machine, for workers on other machines.", {"push": push})


def push(
    folder: Annotated[Path, typer.Argument(help="A folder with tables.")],
    as_json: Json = False,
) -> None:
    """Put a folder of tables into the store (SERIN_STORE), once: the same files have the same URL.

    Prints what to write under data.tables of the spec.
    """
    from serin.pipeline.push_tables import push_tables

    pushed = push_tables(folder)
    if as_json:
        show_json({"tables": pushed.urls, "bytes": pushed.size, "sent": pushed.sent})
        return
    for name in pushed.left_out:
        show(f"not sent: {name} (hidden, a link to elsewhere, or it looks like a secret)")
    size = human_bytes(pushed.size)
    show(f"sent {size}" if pushed.sent else f"the store has these {size} already; nothing was sent")
    show("in the spec:\n  data:\n    tables:")
    for name, url in pushed.urls.items():
        show(f"      {Path(name).stem.lower().replace('-', '_')}: {url}")
