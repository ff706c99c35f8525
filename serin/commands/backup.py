"""Backups of a stack: create, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serin.commands.output import show
from serin.machine import environment


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Copy the state of a stack to a file, and restore it.", no_args_is_help=True)
    group.callback()(lambda: None)
    group.command("create")(create)
    group.command("restore")(restore)
    app.add_typer(group, name="backup")


def create(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist; it will hold secrets.")],
    captures: Annotated[
        bool, typer.Option("--captures/--no-captures", help="Include recorded requests, which may be large.")
    ] = True,
) -> None:
    """Write journals, keys, receivers, the watch's state, Prefect's database and model versions to one file.

    The stack may run. Model versions in an object store stay there. Datasets, trainings and the TLS files are left out.
    """
    from serin.stack.backup.create import create_backup
    from serin.store.store import Store

    made = create_backup(environment.home(), Store.open(), file.expanduser().absolute(), captures=captures)
    manifest = made.manifest
    show(f"{made.path}: {len(manifest.files)} files, {made.bytes:,} bytes, readable by you only")
    for model, version in sorted(manifest.live.items()):
        opened = "; its rollout is open" if model in manifest.open_rollouts else ""
        show(f"  {model} version {version} is live{opened}")
    if not manifest.with_store:
        show(f"  model versions are not in it: back up {manifest.store} by its own means")
    if not manifest.owns_prefect:
        show("  the Prefect server is not the stack's: back up its database by its own means")


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `serin backup create` wrote.")],
) -> None:
    """Restore a backup into an empty SERIN_HOME; rollouts that were open are held. Then: serin up."""
    from serin.stack.backup.restore import restore_backup
    from serin.store.store import Store

    home = environment.home()
    manifest = restore_backup(home, Store.open(), file.expanduser().absolute())
    show(f"restored into {home}; start it with `serin up`")
    for model in manifest.open_rollouts:
        show(
            f"  the rollout of {model} is held: `serin rollout resume {model}` or `serin rollout abort {model}`"
        )
