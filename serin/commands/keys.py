"""Who may call the gateway: API keys (create, list, remove, require) and issuers of tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands import issuers
from serin.commands.arguments import DurationOption
from serin.commands.output import Json, say, show, show_json, show_table, when
from serin.errors import StackUnusable
from serin.machine import environment

if TYPE_CHECKING:
    from serin.serving.envoy.keys import ApiKey

Name = Annotated[str, typer.Argument(help="Who uses the key, or its purpose.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
    group.command("create")(create)
    group.command("list")(list_keys)
    group.command("remove")(remove)
    group.command("require")(require)
    issuers.register(group)
    app.add_typer(group, name="keys")


def create(
    name: Name,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may call; can be repeated. [default: all]")
    ] = None,
    lasts: Annotated[
        float | None,
        DurationOption("How long the key is valid, such as 12h or 90d. [default: until removed]"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Requests that the key may send, such as 100/s or 30/m. [default: no limit]"),
    ] = None,
    burst: issuers.Burst = None,
    as_json: Json = False,
) -> None:
    """Create a key and show it once. From the first key on, the gateway refuses clients without one."""
    from serin.host.wiring import key_file

    keys = key_file(environment.home())
    entry, key = keys.create(name, models=model, lasts_s=lasts, rate=rate, burst=burst)
    issuers.publish()
    if as_json:
        show_json({**_facts(entry), "key": key})
        return
    say(f"the key of {name}; it is shown only once. Clients send the header `authorization: Bearer <key>`:")
    show(key)


def list_keys(as_json: Json = False) -> None:
    """List all keys, also removed and expired ones. The keys themselves are not stored."""
    from serin.host.wiring import key_file

    ring = key_file(environment.home()).read()
    if as_json:
        show_json({"required": ring.required, "keys": [_facts(entry) for entry in ring.keys]})
        return
    rows = [
        (
            entry.name,
            entry.state(time.time()),
            ", ".join(entry.models) if entry.models else "all",
            when(entry.made),
            when(entry.expires) if entry.expires else None,
            str(entry.limit) if entry.limit else None,
        )
        for entry in ring.keys
    ]
    show_table(("name", "state", "models", "made", "expires", "rate"), rows, empty="no keys yet")
    if not ring.required:
        show("no key is required: anyone who can reach the gateway's port gets answers")


def remove(name: Name) -> None:
    """Remove a key: it is refused at once, and listed as revoked. Removing the last key does not open the gateway."""
    from serin.host.wiring import key_file

    key_file(environment.home()).revoke(name)
    issuers.publish()
    show(f"{name} is removed")


def require(
    on: Annotated[
        bool, typer.Option("--on/--off", help="Require a key from every client, or from none.")
    ] = True,
) -> None:
    """Require a key although none exists yet, or stop requiring one."""
    from serin.host.state import read_stack
    from serin.host.wiring import key_file

    stack = read_stack(environment.home())
    if not on and stack is not None and stack.is_alive and stack.is_public:
        raise StackUnusable(
            problem=f"other machines reach this gateway (--address {stack.address}), so keys stay required; "
            "run `serin down` first, or `serin up` without --address"
        )
    key_file(environment.home()).require(on)
    issuers.publish()
    show(
        "a key is required"
        if on
        else "no key is required: anyone who can reach the gateway's port gets answers"
    )


def _facts(entry: ApiKey) -> dict[str, object]:
    return {**entry.model_dump(exclude={"sha256"}), "state": entry.state(time.time())}
