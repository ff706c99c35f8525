"""What a backup holds: its manifest, and which files of a home and of a store belong in it. Reads, and copies nothing.

Left out is what the stack makes again (the gateway's files, records of processes, logs, caches, locks), what can be
built again (datasets, trainings), and files that you gave to `serin up` (the TLS pair).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from serin.errors import BackupBroken, NameInvalid
from serin.machine.typed_json import Document
from serin.spec.names import valid_model_name

MANIFEST: Final = "backup.json"
HOME: Final = "home"  # folders in the archive
STORE: Final = "store"

DATABASES: Final = ("alerts/book.sqlite", "history/history.sqlite", "prefect/prefect.db")
EVENTS: Final = "windows/state"  # of online windows: a folder of LMDB
JOURNALS: Final = "rollouts"
JOURNALED: Final = "cluster/models"
TRUST: Final = "trusted-keys"  # while it exists, versions must be signed: also when it is empty
_FILES: Final = ("audit.jsonl", "keys.json", ".keys-required", "metrics-token", "prefect-login")
_FOLDERS: Final = (
    *("alerts", "console", "watch", "labels", "prefect/storage", TRUST),
    "issuers",  # public keys of OpenID providers: tokens are taken also while a provider does not answer
)
_CAPTURES: Final = "captures"
LEFT_OUT: Final = (  # what the stack makes again, and what a run makes again
    *(
        "agent",
        "cache",
        "cluster-watch",
        "environments",
        "gateway",
        "gpus",
        "imported",  # graphs of a registry: the versions made of them have a copy
        "locks",
        "logs",
        "releases",
        "scores",  # rows that wait for their table: the next run of scheduled scoring makes them
        "spool",
        "stack",
    ),
    *("stack.json", "prefect", "runs", "stages", "tables"),
)
_TRANSIENT: Final = ("-wal", "-shm", ".lock", ".new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of the archive."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Document, form="serin.backup"):
    """`store`: the URL of the store. `with_store`: whether its model versions are in the archive. `live`: the version
    of each model that took the traffic, with the edition of its lookups (`3e2`). `open_rollouts`: models with a rollout
    that had not ended. `signed`: whether versions had to be signed."""

    created: float
    serin: str
    store: str
    with_store: bool
    owns_prefect: bool
    signed: bool
    live: Mapping[str, int | str]
    open_rollouts: tuple[str, ...]
    files: Mapping[str, Entry]

    @classmethod
    def parse(cls, data: bytes, *, path: Path) -> Self:
        """Raises BackupBroken for anything else than a manifest of this version."""
        try:
            manifest = cls.load(data)
            for name in (*manifest.live, *manifest.open_rollouts):
                valid_model_name(name)
            datetime.fromtimestamp(manifest.created, UTC)
            return manifest
        except (ValueError, OverflowError, OSError, NameInvalid) as error:
            raise BackupBroken(path=path, reason=f"its {MANIFEST} cannot be read: {error}") from error


def home_files(home: Path, *, captures: bool) -> Iterator[Path]:
    """The files to copy as they are, relative to the home; neither journals nor databases, which need care."""
    for name in _FILES:
        if (home / name).is_file():
            yield Path(name)
    for folder in (*_FOLDERS, *((_CAPTURES,) if captures else ())):
        yield from _inside(home, folder)


def is_known(name: str) -> bool:
    """Whether this entry of a home is listed here, as backed up or left out."""
    tops = {
        each.split("/")[0]
        for each in (*_FILES, *_FOLDERS, *DATABASES, EVENTS, JOURNALS, JOURNALED, _CAPTURES, *LEFT_OUT)
    }
    return name in tops


def journal_files(home: Path) -> Iterator[Path]:
    """Journals. A waiting command would be obeyed long after it was given, and answers are for the waiting."""
    yield from _inside(home, JOURNALED)
    yield from (path for path in _inside(home, JOURNALS) if path.parent.name == "decisions")


def model_files(store: Path) -> Iterator[Path]:
    """The files of model versions, their numbers and aliases, relative to the store."""
    yield from _inside(store, "models")


def _inside(root: Path, folder: str) -> Iterator[Path]:
    for path in sorted((root / folder).rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)  # files that are being written
        database = str(relative) in DATABASES
        if path.is_file() and not (hidden or database or path.name.endswith(_TRANSIENT)):
            yield relative
