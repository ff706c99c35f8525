"""The stores that a copied version came through, kept beside the version, because a version never changes."""

from __future__ import annotations

from dataclasses import dataclass

from serin.machine.documents import parse_json
from serin.machine.typed_json import Document
from serin.spec.names import valid_model_name
from serin.store.places import writing_to
from serin.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A store that had the version. `by`, `host`, `at`: who copied it from there, where, and when (seconds since
    1970)."""

    store: str
    by: str
    host: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Document, form="serin.origin"):
    """`manifest`: the digest of the version, which is the same in all of them. `stores`: the first one made it."""

    manifest: str
    stores: tuple[Stop, ...]


def read_origin(store: Store, model: str, version: int) -> tuple[Stop, ...]:
    """Returns the stores that a version came through before this one; none when it was made here."""
    key = _key(model, version)
    found = store.shared_files().read(key)
    if found is None:
        return ()
    advice = "remove it; the version itself is not affected"
    return parse_json(f"{store.url}/{key}", found.content, Origin.from_json, advice=advice).stores


def write_origin(store: Store, model: str, version: int, origin: Origin) -> None:
    with writing_to(store.url):
        store.shared_files().put(_key(model, version), origin.dump())


def _key(model: str, version: int) -> str:
    return f"models/{valid_model_name(model)}/origins/{int(version)}.json"
