"""Issuers of tokens: OpenID providers whose JWTs the gateway takes. Add, list, remove."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.output import Json, say, show, show_json, show_table, when
from serin.errors import GatewayRejected, SpecError
from serin.machine import environment

if TYPE_CHECKING:
    from serin.serving.envoy.issuers import Issuer

Name = Annotated[str, typer.Argument(help="A short name of the provider.")]
Rate = Annotated[
    str | None, typer.Option(help="Requests that each subject may send, such as 100/s. [default: no limit]")
]
Burst = Annotated[
    int | None, typer.Option(min=1, help="Requests that may come at once. [default: one unit's]")
]


def register(keys: typer.Typer) -> None:
    group = typer.Typer(help="OpenID providers whose tokens the gateway takes.", no_args_is_help=True)
    group.command("add")(add)
    group.command("list")(list_issuers)
    group.command("remove")(remove)
    keys.add_typer(group, name="issuer")


def add(
    name: Name,
    url: Annotated[str, typer.Option(help="The issuer, exactly as its tokens name it (iss).")],
    audience: Annotated[
        list[str], typer.Option(help="An audience (aud) that tokens are made for; can be repeated.")
    ],
    jwks_url: Annotated[
        str | None, typer.Option(help="Where its public keys are. [default: found by OpenID discovery]")
    ] = None,
    jwks_file: Annotated[
        Path | None, typer.Option(help="A file with its public keys, instead of a URL.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that its tokens may call; can be repeated. [default: all]"),
    ] = None,
    models_claim: Annotated[
        str | None, typer.Option(help="The claim that names the models a token may call.")
    ] = None,
    rate: Rate = None,
    burst: Burst = None,
) -> None:
    """Take the tokens of an OpenID provider. From the first one on, the gateway refuses clients without a key or
    token."""
    from serin.host.wiring import build_gateway, key_file

    home = environment.home()
    issuer = _issuer(
        name=name,
        url=url,
        audiences=tuple(audience),
        jwks_url=jwks_url,
        jwks_file=None if jwks_file is None else str(jwks_file.expanduser().absolute()),
        models=tuple(model) if model else None,
        models_claim=models_claim,
        rate=rate,
        burst=burst,
    )
    found = build_gateway(home).keys.jwks.fetch(issuer)
    key_file(home).add_issuer(issuer)
    publish()
    show(f"tokens of {url} are taken; it has {found.count} public key{'s' if found.count != 1 else ''}")


def list_issuers(as_json: Json = False) -> None:
    """List the issuers, and when their public keys were last read."""
    from serin.host.wiring import build_gateway, key_file

    home = environment.home()
    ring, jwks = key_file(home).read(), build_gateway(home).keys.jwks
    found = [(issuer, jwks.known(issuer)) for issuer in ring.issuers]
    if as_json:
        facts = [
            {
                **issuer.model_dump(),
                "public_keys": known.count if known else 0,
                "public_keys_read": known.fetched if known else None,
            }
            for issuer, known in found
        ]
        show_json(facts)
        return
    rows = [
        (
            issuer.name,
            issuer.url,
            ", ".join(issuer.audiences),
            _models(issuer),
            str(issuer.limit) if issuer.limit else None,
            f"{known.count}, {when(known.fetched)}" if known else "none: its tokens are refused",
        )
        for issuer, known in found
    ]
    columns = ("name", "issuer", "audiences", "models", "rate", "public keys, read")
    show_table(columns, rows, empty="no issuers yet")


def remove(name: Name) -> None:
    """Refuse the tokens of an issuer, effective at once. Removing the last one does not open the gateway."""
    from serin.host.wiring import build_gateway, key_file

    home = environment.home()
    issuer = key_file(home).remove_issuer(name)
    publish()
    build_gateway(home).keys.jwks.forget(issuer)
    show(f"tokens of {issuer.url} are no longer taken")


def publish() -> None:
    """Applies the change to a running gateway now; else the controller or the next `serin up` does."""
    from serin.host.wiring import build_gateway

    gateway = build_gateway(environment.home())
    if not gateway.ready():
        say("no gateway is running here; the change applies from its next start")
        return
    try:
        gateway.follow_keys()
    except GatewayRejected as error:
        say(f"stored, but not applied yet ({error}); the controller will retry")
        raise


def _models(issuer: Issuer) -> str:
    if issuer.models_claim is not None:
        return f"claim {issuer.models_claim}"
    return ", ".join(issuer.models) if issuer.models else "all"


def _issuer(**fields: object) -> Issuer:
    from pydantic import ValidationError

    from serin.serving.envoy.issuers import Issuer

    try:
        return Issuer.model_validate({**fields, "added": time.time()})
    except ValidationError as error:
        problems = [
            (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, "))
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise SpecError(where=f"issuer {fields['name']!r}", problems=problems) from error
