"""Recorded requests that hosts share through their store: where they are, and how far a host has uploaded its own.

    captures/records/<model>/<host>/<writer>/<version>/<hour>/<first>-<last>-<rows>-<sha256>.parquet
    captures/records/<model>/<host>/<writer>/counters.json
    captures/gone/<host>.json      a host that does not come back: the others delete rows in its place

A file has the numbers and rows of those in a home (formats/captures.py), and the same rule says which files are
replaced. Only one home writes below its <writer>, a random name. It is kept in the home, in
captures/<model>/shared.json, with the number of the last part that was uploaded.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from serin.errors import NameInvalid
from serin.formats.captures import RecordFile, captures_folder, file_name
from serin.machine.documents import read_json
from serin.machine.durable import write_whole
from serin.machine.typed_json import Document, checked
from serin.store.objects import Entry

RECORDS: Final = "captures/records/"
GONE: Final = "captures/gone/"
STATE: Final = "shared.json"
COUNTERS: Final = "counters.json"
FORMAT, VERSION = "serin.shared_captures", 1

_KEY: Final = re.compile(
    r"captures/records/([^/]+)/([^/]+)/([0-9a-f]{12})/(\d+)/(\d{4}-\d\d-\d\dT\d\d)/"
    r"(\d{12})-(\d{12})-(\d+)-([0-9a-f]{64})\.parquet"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A home on a host, for one model."""

    model: str
    host: str
    id: str

    @property
    def prefix(self) -> str:
        return f"{RECORDS}{self.model}/{self.host}/{self.id}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile(RecordFile):
    """A file in the store. Its content is `sha256`."""

    key: str
    writer: Writer
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Its name in a home."""
        return file_name(self.first, self.last, self.rows)

    @property
    def folder(self) -> tuple[Writer, int, str]:
        return self.writer, self.version, self.hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing(Document, form="serin.shared_captures"):
    """How far a home has uploaded a model's records: all parts up to `last`. `open`: hours, as <version>/<hour>, of
    which the store has small files that are still to be replaced by one. `restored`: whether the store has rows of this
    home under an earlier name, too."""

    writer: str
    last: int = 0
    open: tuple[str, ...] = ()
    restored: bool = False


def file_key(
    writer: Writer, version: int, hour: str, numbers: tuple[int, int], rows: int, sha256: str
) -> str:
    name = file_name(*numbers, rows).removesuffix(".parquet")
    return f"{writer.prefix}{version}/{hour}/{name}-{sha256}.parquet"


def shared_files(entries: Iterable[Entry]) -> list[SharedFile]:
    """The files of records among the entries of a listing, by key."""
    found = []
    for entry in sorted(entries, key=lambda entry: entry.key):
        if match := _KEY.fullmatch(entry.key):
            model, host, writer, version, hour, first, last, rows, sha256 = match.groups()
            found.append(
                SharedFile(
                    key=entry.key,
                    writer=Writer(model=model, host=host, id=writer),
                    version=int(version),
                    hour=hour,
                    first=int(first),
                    last=int(last),
                    rows=int(rows),
                    size=entry.size,
                    sha256=sha256,
                )
            )
    return found


def read_sharing(home: Path, model: str) -> Sharing | None:
    """None: nothing of this model is to be uploaded from here. Raises FileBroken when that cannot be read."""
    advice = f"restore it, or move it away: all records of {model} on this host are then uploaded again"
    return read_json(captures_folder(home, model) / STATE, Sharing.from_json, advice=advice)


def write_sharing(home: Path, model: str, sharing: Sharing) -> None:
    """Durable once this returns. Only the process that uploads calls it."""
    write_whole(captures_folder(home, model) / STATE, sharing.dump())


def begin_sharing(home: Path, model: str) -> Sharing:
    """The state of a model's records, made where there is none."""
    found = read_sharing(home, model)
    if found is None:
        found = Sharing(writer=secrets.token_hex(6))
        write_sharing(home, model, found)
    return found


def after_restore(home: Path, model: str, sharing: Sharing) -> Sharing:
    """The state of a home that was set back, to a backup for example: its next numbers are taken in the store, so it
    gets another name. Rows that it recorded and uploaded around the time of the backup may be uploaded again."""
    renamed = replace(sharing, writer=secrets.token_hex(6), open=(), restored=True)
    write_sharing(home, model, renamed)
    return renamed


def dump_counters(document: Mapping[str, Any], last: int) -> bytes:
    """What other hosts see of a home's counters.json."""
    kept = {name: document[name] for name in ("releases", "lost_rows") if name in document}
    return json.dumps({"format": FORMAT, "version": VERSION, "last": last, **kept}, sort_keys=True).encode()


def load_counters(content: bytes) -> dict[str, Any]:
    """Empty for anything else."""
    try:
        return checked(json.loads(content), FORMAT, VERSION)
    except ValueError:
        return {}


def checked_host(host: str) -> str:
    """Returns a name that can be a part of a key, else raises NameInvalid."""
    if not host or "/" in host or host.startswith("."):
        rule = "without slashes and a dot at its start (SERIN_HOST)"
        raise NameInvalid(kind="host", name=host, rule=rule)
    return host
