"""Who may call the gateway: API keys (create, list, remove, require) and issuers of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from serin.commands.arguments import Commands, DurationOption, add_group
from serin.commands.output import Json, say, show, show_json, show_table, when
from serin.errors import GatewayRejected, SpecError, StackUnusable
from serin.machine import environment

if TYPE_CHECKING:
    from serin.serving.envoy.gateway import Gateway
    from serin.serving.envoy.issuers import Issuer
    from serin.serving.envoy.keys import ApiKey, KeyFile, KeyRing

T = TypeVar("T")
_NOT_RUNNING = "no gateway is running here; the change applies from its next start"
_OPEN = "no key is required: anyone who can reach the gateway's port gets answers"

Name = Annotated[str, typer.Argument(help="Who uses the key, or its purpose.")]
Provider = Annotated[str, typer.Argument(help="A short name of the provider.")]
Rate = Annotated[
    str | None, typer.Option(help="Requests that each subject may send, such as 100/s. [default: no limit]")
]
Burst = Annotated[
    int | None, typer.Option(min=1, help="Requests that may come at once. [default: one unit's]")
]


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "create": create, "list": list_keys, "remove": remove, "require": require, "share": share,
    }  # fmt: skip
    group = add_group(app, "keys", "API keys of the gateway.", commands)
    issuers: Commands = {"add": add_issuer, "list": list_issuers, "remove": remove_issuer}
    add_group(group, "issuer", "OpenID providers whose tokens the gateway takes.", issuers)


def create(
    name: Name,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that the key is for, or the beginning of names with a * behind it; can be repeated. "
            "[default: all]"
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="What the key may do at the console: view, release or administer. [default: nothing]",
            show_default=False,
        ),
    ] = None,
    lasts: Annotated[
        float | None,
        DurationOption("How long the key is valid, such as 12h or 90d. [default: until removed]"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Requests that the key may send, such as 100/s or 30/m. [default: no limit]"),
    ] = None,
    burst: Burst = None,
    as_json: Json = False,
) -> None:
    """Create a key and show it once. From the first key on, the gateway refuses clients without one.

    Each key may ask for answers of its models and push their events, whatever its role.
    """
    entry, key = _change(
        lambda keys: keys.create(name, models=model or None, role=role, lasts_s=lasts, rate=rate, burst=burst)
    )
    _publish()
    if as_json:
        show_json({**_facts(entry), "key": key})
        return
    say(f"the key of {name}; it is shown only once. Clients send the header `authorization: Bearer <key>`:")
    show(key)


def list_keys(as_json: Json = False) -> None:
    """List all keys, also removed and expired ones. The keys themselves are not stored."""
    ring = _current()
    if as_json:
        show_json({"required": ring.required, "keys": [_facts(entry) for entry in ring.keys]})
        return
    rows = [
        (
            entry.name,
            entry.state(time.time()),
            "all" if entry.models is None else ", ".join(entry.models) or "none",
            entry.role,
            when(entry.made),
            when(entry.expires) if entry.expires else None,
            str(entry.limit) if entry.limit else None,
        )
        for entry in ring.keys
    ]
    show_table(("name", "state", "models", "role", "made", "expires", "rate"), rows, empty="no keys yet")
    if not ring.required:
        show(_OPEN)


def remove(name: Name) -> None:
    """Remove a key: it is refused at once, and listed as revoked. Removing the last key does not open the gateway."""
    _change(lambda keys: keys.revoke(name))
    _publish()
    show(f"{name} is removed")


def require(
    on: Annotated[
        bool, typer.Option("--on/--off", help="Require a key from every client, or from none.")
    ] = True,
) -> None:
    """Require a key although none exists yet, or stop requiring one."""
    from serin.host.state import read_stack

    stack = read_stack(environment.home())
    if not on and stack is not None and stack.is_alive and stack.is_public:
        raise StackUnusable(
            problem=f"other machines reach this gateway (--address {stack.address}), so keys stay required; "
            "run `serin down` first, or `serin up` without --address"
        )
    _change(lambda keys: keys.require(on))
    _publish()
    show("a key is required" if on else _OPEN)


def share() -> None:
    """Make the keys and issuers of this home those of all hosts that share the store, where they have none yet.

    On Kubernetes: in the home whose keys.json the secret serin-gateway-keys was made of. From then on `serin keys` on
    any machine with the store's credentials changes the keys of all gateways.
    """
    from serin.cluster.shared_keys import SharedKeys
    from serin.rollout.run.access import find_cluster

    home = environment.home()
    objects = find_cluster(home)
    if objects is None:
        raise StackUnusable(problem="no hosts share the keys of this home: no controller leads in its store")
    if not (file := _keys()).path.is_file():
        raise StackUnusable(problem=f"{home} has no keys to share; `serin keys create` makes one")
    shared = SharedKeys(objects, file)
    if shared.exist():
        raise StackUnusable(
            problem=f"the hosts of {objects.url} share keys already; `serin keys list` shows them"
        )
    count = shared.change(lambda keys: len(keys.read().keys))
    show(f"{count} key{'s' if count != 1 else ''} of {home} are those of all hosts of {objects.url} now")


def _keys() -> KeyFile:
    from serin.host.wiring import key_file

    return key_file(environment.home())


def _current() -> KeyRing:
    from serin.cluster.shared_keys import current_keys

    return current_keys(environment.home())


def _change(act: Callable[[KeyFile], T]) -> T:
    """Changes the keys of this home, or of all hosts where an agent of several serves."""
    from serin.cluster.shared_keys import SharedKeys
    from serin.host.state import read_stack
    from serin.rollout.run.access import find_cluster

    home = environment.home()
    objects = find_cluster(home)
    if objects is None:
        return act(_keys())
    stack, shared = read_stack(home), SharedKeys(objects, _keys())
    serves = stack is not None and stack.agent  # else no gateway requires the keys of this home
    if not serves and not shared.exist():
        problem = (
            f"the hosts of {objects.url} share no keys yet: make the first one on a host with `serin agent`: its "
            "keys become those of all. On Kubernetes, run `serin keys share` once in the home whose keys.json the "
            "secret serin-gateway-keys was made of"
        )
        raise StackUnusable(problem=problem)
    return shared.change(act)


def _gateway() -> Gateway:
    from serin.host.wiring import build_gateway

    return build_gateway(environment.home())


def _facts(entry: ApiKey) -> dict[str, object]:
    return {**entry.model_dump(exclude={"sha256"}), "state": entry.state(time.time())}


def add_issuer(
    name: Provider,
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
        typer.Option(
            help="A model that its tokens may call, or the beginning of names with a * behind it; can be repeated. "
            "[default: all]"
        ),
    ] = None,
    models_claim: Annotated[
        str | None, typer.Option(help="The claim that names the models a token may call.")
    ] = None,
    rate: Rate = None,
    burst: Burst = None,
) -> None:
    """Take the tokens of an OpenID provider. From the first one on, the gateway refuses clients without a key or
    token."""
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
    found = _gateway().keys.jwks.fetch(issuer)
    _change(lambda keys: keys.add_issuer(issuer))
    _publish()
    show(f"tokens of {url} are taken; it has {found.count} public key{'s' if found.count != 1 else ''}")


def list_issuers(as_json: Json = False) -> None:
    """List the issuers, and when their public keys were last read."""
    ring, jwks = _current(), _gateway().keys.jwks
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


def remove_issuer(name: Provider) -> None:
    """Refuse the tokens of an issuer, effective at once. Removing the last one does not open the gateway."""
    issuer = _change(lambda keys: keys.remove_issuer(name))
    _publish()
    _gateway().keys.jwks.forget(issuer)
    show(f"tokens of {issuer.url} are no longer taken")


def _publish() -> None:
    """Applies the change to a running gateway now; else the controller or the next `serin up` does."""
    from serin.rollout.run.access import find_cluster

    gateway = _gateway()
    if not gateway.ready():
        shared = find_cluster(environment.home()) is not None
        say("the gateways of all hosts take the change within seconds" if shared else _NOT_RUNNING)
        return
    try:
        gateway.keys.follow()
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
