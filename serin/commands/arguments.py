"""Arguments and options that several commands share, and how a version is named: MODEL[:VERSION]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.spec.names import split_version

if TYPE_CHECKING:
    from serin.store.store import Store

Commands = Mapping[str, Callable[..., None]]
Model = Annotated[str, typer.Argument(help="The model's name.")]
ModelVersion = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[:VERSION]",
        help="A model's name, and after a colon a version: its number (3e2: edition 2 of its lookups), or live, "
        "candidate, previous.",
    ),
]
Why = Annotated[str, typer.Option("--why", help="A reason, for the journal.")]
_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
Since = Annotated[
    datetime | None,
    typer.Option(formats=_TIMES, metavar="TIME", help="Only rows that arrived from then on, UTC."),
]
Until = Annotated[
    datetime | None,
    typer.Option(formats=_TIMES, metavar="TIME", help="Only rows that arrived before then, UTC."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def DurationOption(help: str, *, zero: bool = False) -> Any:  # noqa: N802, A002 - as typer.Option
    """An option for a duration as in a spec (30s, 10m, 90d), which the command gets in seconds. `zero`: 0s is one."""

    def parsed(text: str | float) -> float:
        from serin.spec.section import seconds

        try:
            found = float(seconds(text))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if found <= 0 and not (zero and found == 0):
            raise typer.BadParameter(f"{text!r} must be longer than 0")
        return found

    return typer.Option(parser=parsed, metavar="DURATION", help=help, show_default=False)


def add_group(app: typer.Typer, name: str, about: str, commands: Commands) -> typer.Typer:
    """Add a group of commands to `app`. Without a command it shows its help."""
    group = typer.Typer(help=about, no_args_is_help=True)
    group.callback()(lambda: None)
    for command, function in commands.items():
        group.command(command)(function)
    app.add_typer(group, name=name)
    return group


def numbered(name: str) -> tuple[str, int | None]:
    """The model and the number of the version that MODEL[:VERSION] names; None when it names none."""
    model, version = split_version(name)
    return model, None if version is None else open_store().release(name).version


def utc_seconds(moment: datetime | None) -> float | None:
    """Seconds since 1970 of a time that was given in UTC."""
    return None if moment is None else moment.replace(tzinfo=UTC).timestamp()


def open_store() -> Store:
    from serin.store.store import Store

    return Store.open()
