"""A folder of tables into the store, once, by content: workers on other machines read them at the URL that it gets.

    tables/<digest>/<name>            the files
    published/tables/<digest>.json    their list, written last

The digest is that of the list, so the same files have the same URL. `serin gc` leaves them alone: a spec may name them.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from serin.errors import ObjectExists, SpecError
from serin.machine import environment
from serin.machine.documents import canonical
from serin.pipeline.pack import SECRET
from serin.store.file_list import Published, list_files, marker_key
from serin.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedTables:
    """`urls`: by the name of each file or folder in the folder, as a spec names it. `sent`: False when the store had
    them. `left_out`: names that are not sent."""

    urls: dict[str, str]
    size: int
    sent: bool
    left_out: tuple[str, ...]


def push_tables(folder: Path) -> PushedTables:
    """Uploads what the store does not have. Hidden files and those that look like secrets are left out."""
    if environment.shared_store_url() is None:
        problem = "is not set: the store in SERIN_HOME is on this machine alone; set it to the workers' store"
        raise SpecError(where="serin tables push", problems=[("SERIN_STORE", problem)])
    if not folder.is_dir():
        raise SpecError(
            where=str(folder), problems=[("FOLDER", "is not a folder; name the one with the tables")]
        )
    store, listed = Store.open(), list_files(folder)
    linked = [name for name in listed.files if not _is_inside(folder, name)]
    left_out = [name for name in listed.files if SECRET.search(name) or name in linked]
    files = {name: file for name, file in listed.files.items() if name not in left_out}
    if not files:
        raise SpecError(where=str(folder), problems=[("FOLDER", "holds no file that can be sent")])
    described = canonical({name: asdict(file) for name, file in files.items()})
    place = f"tables/{hashlib.sha256(described).hexdigest()}"
    base = store.url if "://" in store.url else str(Path(store.url).expanduser().absolute())
    found = store.shared_files().read(marker_key(place)) is not None
    if not found:
        store.shared_files().upload({f"{place}/{name}": folder / name for name in files})
        with suppress(ObjectExists):
            published = Published(attempt="", by=environment.host(), files=files)
            store.shared_files().create(marker_key(place), published.to_bytes())
    tops = dict.fromkeys(name.partition("/")[0] for name in files)
    return PushedTables(
        urls={top: f"{base.rstrip('/')}/{place}/{top}" for top in tops},
        size=sum(file.size for file in files.values()),
        sent=not found,
        left_out=tuple(left_out),
    )


def _is_inside(folder: Path, name: str) -> bool:
    """Whether no link leads out of the folder."""
    return (folder / name).resolve().is_relative_to(folder.resolve())
