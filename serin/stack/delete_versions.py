"""Deletes model versions from the store, unless one is served, rolled out, kept for a rollback or in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from serin.errors import NotFound, VersionInUse
from serin.machine.locks import unused
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.status import status_of
from serin.store.artifacts import version_label
from serin.store.store import Store


def delete_versions(store: Store, home: Path, model: str, version: str | None = None) -> list[int]:
    """Delete one version (a number or an alias), or all of `model`. VersionInUse when one must stay: then all stay.

    A version disappears in one step with the editions of its lookups, and its number is never given out again. Its
    dataset stays until `serin gc`.
    """
    going = versions_to_delete(store, home, model, version)
    with ExitStack() as held:
        locks = []
        places = {
            f"models/{model}/versions/{version_label(number, edition)}": number
            for number in going
            for edition in store.editions(model, number)
        }
        for place, number in places.items() if store.local else ():
            lock = store.lock(place)
            if not held.enter_context(unused(lock)):
                raise VersionInUse(model=model, version=number, reason="a process uses it; wait for its end")
            locks.append(lock)
        for alias, number in store.aliases(model).items():
            if number in going:
                store.set_alias(model, alias, None)
        for place in places:
            store.remove(place)
        for lock in locks:
            lock.unlink(missing_ok=True)
    return going


def versions_to_delete(store: Store, home: Path, model: str, version: str | None) -> list[int]:
    """The versions that `delete_versions` would delete. NotFound, or VersionInUse with the way out."""
    known = store.versions(model)
    if not known:
        raise NotFound(kind="model", name=model, known=store.models())
    found = None if version is None else store.bundle(model, version)
    if found is not None and found.edition > 1:
        reason = f"{found.release.label} is an edition of it; `serin gc` removes editions that nothing needs"
        raise VersionInUse(model=model, version=found.version, reason=reason)
    going = known if found is None else [found.version]
    for number in going:
        for reason in _reasons(store, home, model, number):
            raise VersionInUse(model=model, version=number, reason=reason)
    return going


def _reasons(store: Store, home: Path, model: str, version: int) -> Iterator[str]:
    """Why a version has to stay."""
    status = status_of(find_rollouts(home), model)
    if status is not None and status.rollout.running and status.rollout.version == version:
        yield f"it is being rolled out; run `serin rollout abort {model}` first"
    live = {store.aliases(model).get("live"), status.live if status else None}
    if version in live:
        yield f"it is live; run `serin retire {model}` first, or roll out another version"
    running = {release.version for release in status.releases} if status else set()
    if version in running or store.aliases(model).get("candidate") == version:
        yield "a rollout uses it; wait for its end"
    if live != {None} and store.aliases(model).get("previous") == version:
        yield f"`serin rollout rollback {model}` would return to it; run `serin retire {model}` first"
