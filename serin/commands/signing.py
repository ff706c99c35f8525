"""Signatures of model versions (models sign, models verify), and the keys that are trusted (trust)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.arguments import Commands, ModelVersion, add_group, open_store
from serin.commands.output import Json, say, show, show_json, show_table
from serin.errors import BundleUntrusted, SpecError, StoreError
from serin.machine import environment

if TYPE_CHECKING:
    from serin.formats.policy import Policy
    from serin.store.store import Store
    from serin.store.trust import Trust

Name = Annotated[str, typer.Argument(help="Who signs with the key.")]


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "create": create, "add": add, "list": list_keys, "remove": remove, "off": off, "policy": policy,
    }  # fmt: skip
    add_group(app, "trust", "Keys that must have signed a version before it is loaded.", commands)


def sign_model(
    name: ModelVersion,
    key: Annotated[
        Path | None, typer.Option(help="The private key. [default: the file that SERIN_SIGNING_KEY names]")
    ] = None,
) -> None:
    """Sign a version, after checking its files. [default: the newest]"""
    from serin.formats.bundle import verify_bundle
    from serin.store.trust import read_private_key, sign_version

    path = key or environment.path("SERIN_SIGNING_KEY")
    if path is None:
        problem = "name the private key with --key or SERIN_SIGNING_KEY; `serin trust create FILE` makes one"
        raise SpecError(where="serin models sign", problems=[("", problem)])
    private, store = read_private_key(path), open_store()
    bundle = store.find(name)
    folder = Path(bundle.path)
    verify_bundle(folder, digest=bundle.digest)
    fingerprint = sign_version(store, bundle.model, bundle.release.label, folder, private)
    show(f"{bundle.model} version {bundle.version} is signed by {fingerprint[:16]}")


def verify_model(name: ModelVersion) -> None:
    """Check that every file of a version matches its manifest, that there are no others, and who has signed it.
    [default: the newest]"""
    from serin.formats.bundle import verify_bundle
    from serin.store.trust import signatures_of

    store = open_store()
    bundle = store.find(name)
    manifest = verify_bundle(Path(bundle.path), digest=bundle.digest)
    show(
        f"{bundle.model} version {bundle.version}: {len(manifest.files)} files match its manifest "
        f"({bundle.digest[:12]})"
    )
    trusted = _trust().check(store, bundle)
    if trusted is not None:
        show(f"signed by {trusted.name} ({str(trusted.fingerprint)[:16]})")
        return
    signatures = signatures_of(store, bundle)
    if signatures is None:
        show("its file of signatures is damaged; no trusted keys are set, so it is not needed")
    elif signatures:
        names = ", ".join(each.key[:16] for each in signatures)
        show(f"signed by {names}; not checked, because no trusted keys are set (`serin trust add`)")
    else:
        show("not signed")


def create(
    file: Annotated[
        Path, typer.Argument(help="Where to write the private key; FILE.pub gets the public one.")
    ],
) -> None:
    """Make a pair of keys for signatures. The private key is readable by its owner only."""
    from serin.store.trust import create_key, fingerprint, public_pem

    public = create_key(file)
    other = file.with_name(f"{file.name}.pub")
    other.write_text(public_pem(public))
    show(f"{file} signs; give {other} to those who trust it ({fingerprint(public)[:16]})")


def add(
    name: Name,
    file: Annotated[Path, typer.Argument(help="The public key (PEM, ed25519).")],
) -> None:
    """Trust a public key. From the first one on, the stack loads only versions that a trusted key has signed."""
    trust = _trust()
    found = trust.add(name, file)
    show(f"{name} is trusted ({str(found.fingerprint)[:16]})")
    try:
        unsigned = _unsigned(open_store())
    except StoreError as error:
        say(f"not known whether the live versions are signed by a trusted key: {error}")
        return
    for release in unsigned:
        say(f"{release} is live and not signed by a trusted key: it will not be started again")


def list_keys(as_json: Json = False) -> None:
    """List the trusted keys."""
    trust = _trust()
    found = trust.keys()
    if as_json:
        keys = [
            {"name": each.name, "fingerprint": each.fingerprint, "trouble": each.trouble} for each in found
        ]
        show_json({"required": trust.is_required, "keys": keys})
        return
    rows = [(each.name, (each.fingerprint or "")[:16] or None, each.trouble) for each in found]
    empty = "no trusted keys: no version is loaded" if trust.is_required else "no trusted keys"
    show_table(("name", "fingerprint", "trouble"), rows, empty=empty)
    if not trust.is_required:
        show("signatures are not asked for: every version in the store can be loaded")


def remove(name: Name) -> None:
    """Trust a key no longer. Without any trusted key no version is loaded; `serin trust off` ends that."""
    trust = _trust()
    trust.remove(name)
    show(f"{name} is not trusted any more")
    if not trust.keys():
        show("no key is trusted now: no version is loaded; `serin trust off` stops asking for signatures")


def off() -> None:
    """Stop asking for signatures, and forget the trusted keys."""
    if environment.path("SERIN_TRUSTED_KEYS") is not None:
        problem = "SERIN_TRUSTED_KEYS asks for signatures; unset it, and restart the stack"
        raise SpecError(where="serin trust off", problems=[("", problem)])
    _trust().end()
    show("signatures are not asked for: every version in the store can be loaded")


def policy(
    signer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE", help="Set it: the public key of one who may sign; several may be given."
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(
            help="Set it: what a version must have passed: gate, champion, groups; several may be given."
        ),
    ] = None,
    approval: Annotated[
        bool,
        typer.Option(
            "--approval",
            help="Set it: each rollout waits for `serin rollout approve` before its first request.",
        ),
    ] = False,
    off: Annotated[bool, typer.Option("--off", help="Set it: nothing is asked for.")] = False,
    as_json: Json = False,
) -> None:
    """Show or set the policy of the store: what a version must have to be copied there or rolled out from there.

    It is kept in the store, and adds to the trusted keys of each host that serves from it.
    """
    from serin.formats.policy import read_policy, write_policy

    store = open_store()
    if off or signer or check or approval:
        write_policy(store, _wanted([], []) if off else _wanted(signer or [], check or [], approval))
    found = read_policy(store)
    if as_json:
        show_json(found.to_json())
        return
    show(f"policy of {store.url}")
    show(f"  signed by  {' or '.join(sorted(found.signers)) or 'nobody has to sign a version'}")
    show(f"  checks     {', '.join(found.checks) or 'none'}")
    show(f"  approval   {'each rollout waits for one' if found.approval else 'where the spec asks for one'}")


def _wanted(signers: list[str], checks: list[str], approval: bool = False) -> Policy:
    from serin.formats.policy import CHECKS, Policy
    from serin.store.trust import public_key_at, public_pem

    keys = {}
    for each in signers:
        name, _, file = each.partition("=")
        if not name or not file:
            raise typer.BadParameter(f"{each!r} is not NAME=FILE", param_hint="--signer")
        keys[name] = public_pem(public_key_at(Path(file)))
    known = [check for check in CHECKS if check in checks]
    if unknown := set(checks) - set(known):
        named = ", ".join(sorted(unknown))
        raise typer.BadParameter(f"{named}: the checks are {', '.join(CHECKS)}", param_hint="--check")
    return Policy(signers=keys, checks=tuple(known), approval=approval)


def _trust() -> Trust:
    from serin.store.trust import Trust

    return Trust.open()


def _unsigned(store: Store) -> list[str]:
    """Returns the live versions that no trusted key has signed."""
    found, trust = [], _trust()
    for model in store.models():
        if "live" in store.aliases(model):
            try:
                trust.check(store, store.bundle(model, "live"))
            except BundleUntrusted as error:
                found.append(str(error.release))
    return found
