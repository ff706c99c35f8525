"""The command `serin console`: the secrets with which people log in to the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, say, show, show_json
from serin.errors import NameInvalid
from serin.machine import environment

if TYPE_CHECKING:
    from serin.host.console import Role


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The console: the stack's web page.", no_args_is_help=True)
    group.callback()(lambda: None)
    group.command("secret")(secret)
    app.add_typer(group, name="console")


def secret(
    role: Annotated[
        str | None, typer.Argument(help="viewer or operator. [default: both]", show_default=False)
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace it. Logins with the old one end at once.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the secrets of the two roles: a viewer reads, an operator may also act."""
    from serin.host.console import role_secret, rotate_secret
    from serin.host.state import read_stack

    home = environment.home()
    found = {name: (rotate_secret if rotate else role_secret)(home, name) for name in _roles(role)}
    if as_json:
        show_json(found)
        return
    stack = read_stack(home)
    if stack is not None and stack.is_alive and stack.console_url:
        say(f"the console is at {stack.console_url}")
    for name, value in found.items():
        show(value if role else f"{name:<9} {value}")


def _roles(role: str | None) -> tuple[Role, ...]:
    from serin.host.console import ROLES

    if role is not None and role not in ROLES:
        raise NameInvalid(kind="role", name=role, rule="one of viewer, operator")
    return tuple(name for name in ROLES if role in (None, name))
