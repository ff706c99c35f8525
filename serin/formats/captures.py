"""Recorded requests on disk: where they are, what their columns are called, and how a part is written.

    captures/<model>/<version>/<YYYY-MM-DDTHH>/<first>-<last>-<rows>.parquet    rows by their UTC hour of arrival
    captures/<model>/counters.json                                             how many were recorded and dropped
    captures/<model>/lock                                                      held by the process that writes

A file holds the parts `first` to `last`: numbers that rise for each model as parts are written, whatever the clock
says. It is written completely or not at all. A file replaces all others in its folder whose numbers are within its own
(several small parts merged), and one with the same numbers but more rows (some were deleted): `parts_of_hour` leaves
replaced files out, so a reader sees every row once at any time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import FileBroken
from serin.machine.documents import read_json
from serin.machine.durable import make_private, sync, write_whole
from serin.machine.locks import locked
from serin.machine.typed_json import checked
from serin.spec.names import valid_model_name

METADATA: Mapping[str, pa.DataType] = {
    "_id": pa.string(),  # made by the gateway; the run and partition in bulk scoring
    "_row": pa.int32(),  # of the request, from 0
    "_client_id": pa.string(),  # the client's own, not unique
    "_t": pa.timestamp("us", "UTC"),
    "_release": pa.string(),
    "_arm": pa.string(),
    "_epoch": pa.int64(),
    "_status": pa.int32(),  # HTTP
    "_latency_ms": pa.float32(),
    "_source": pa.string(),  # LIVE, BULK or batch
}
LIVE, BULK = "live", "bulk"  # the sources that are traffic: what clients sent, what a schedule scored
ANSWER: Final = "_answer_"
COUNTERS, LOCK = "counters.json", "lock"
FORMAT, VERSION = "serin.captures", 1
PARTS: Final = b"serin.parts"  # metadata of a file: [[number, rows], ...] in the order of its rows
BYTES: Final = b"serin.bytes"  # of its rows in memory: a string that many rows have is on disk once
SCRATCH: Final = "."  # how the names of unfinished files begin

_FILE = re.compile(r"(\d{12})-(\d{12})-(\d+)\.parquet")
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
_HOUR_US = 3_600_000_000
_GROUP_ROWS = 1 << 17
_SINGLE: Final = ("_id", "_client_id")  # whose values are hardly ever equal
_CONTENT: Final[dict[str, Any]] = {"last": 0, "publish": [], "releases": {}, "writers": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """A file with the parts `first` to `last`, in a home or in a store."""

    version: int
    hour: str
    first: int
    last: int
    rows: int


F = TypeVar("F", bound=RecordFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(RecordFile):
    """Rows that were written together, or several such parts merged. The rows are those of the file at `path` from
    `offset` on. `sequence` sorts by the order of writing and may be kept as the last part seen."""

    path: Path
    offset: int = 0

    @property
    def sequence(self) -> str:
        return f"{self.last:012d}"


def captures_folder(home: Path, model: str | None = None) -> Path:
    folder = home / "captures"
    return folder if model is None else folder / valid_model_name(model)


def versions_captured(home: Path, model: str) -> list[int]:
    names = _entries(captures_folder(home, model))
    return sorted(int(name) for name in names if name.isdigit())


def hours_captured(home: Path, model: str, version: int) -> list[str]:
    """The hours with records of a version, oldest first."""
    names = _entries(captures_folder(home, model) / str(version))
    return sorted(name for name in names if _HOUR.fullmatch(name))


def hour_folders(home: Path, model: str, versions: Collection[int] | None = None) -> list[Path]:
    """The folders of the recorded hours of all versions, or of some: by version, oldest first."""
    return [
        captures_folder(home, model) / str(version) / hour
        for version in versions_captured(home, model)
        if versions is None or version in versions
        for hour in hours_captured(home, model, version)
    ]


def parts_of_hour(folder: Path) -> list[Part]:
    """The parts in an hour's folder in the order of writing, without those that another one replaces."""
    found = []
    for name in _entries(folder):
        if match := _FILE.fullmatch(name):
            first, last, rows = (int(text) for text in match.groups())
            version, hour = int(folder.parent.name), folder.name
            found.append(
                Part(path=folder / name, version=version, hour=hour, first=first, last=last, rows=rows)
            )
    return in_force(found)


def in_force(files: Iterable[F]) -> list[F]:
    """The files of one hour in the order of writing, without those that another one replaces. Of files that begin
    together the widest replaces the others, of equals the one with the fewest rows."""
    kept: list[F] = []
    for file in sorted(files, key=lambda file: (file.first, -file.last, file.rows)):
        if not kept or file.last > kept[-1].last:
            kept.append(file)
    return kept


def open_part(path: Path) -> pq.ParquetFile:
    """Opens a file of records. Raises FileBroken when it is damaged, FileNotFoundError when it is gone."""
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        advice = "restore it from a backup, or remove it: its rows are then missing"
        raise FileBroken(path=path, problem=str(error).splitlines()[0], advice=advice) from error


def part_map(path: Path) -> list[tuple[int, int]]:
    """The numbers of the parts in a file and how many rows each has, in the order of its rows."""
    with open_part(path) as file:
        return [(int(number), int(rows)) for number, rows in json.loads(file.metadata.metadata[PARTS])]


def bytes_in_memory(path: Path) -> int:
    """How many bytes all rows of a file take once they are read."""
    return int(pq.read_metadata(path).metadata[BYTES])


@contextmanager
def writing(home: Path, model: str) -> Iterator[Path]:
    """Holds the model's lock: only one process adds, merges or deletes its records. Yields the model's folder, in which
    everything that is counted has its name."""
    make_private(captures_folder(home))
    folder = make_private(captures_folder(home, model))
    with locked(folder / LOCK):
        finish_commit(home, model)
        yield folder


def read_document(home: Path, model: str) -> dict[str, Any]:
    """The content of counters.json; empty when there is none. Raises FileBroken when it cannot be read: records that
    are written without it would be counted twice."""

    def counters(document: Any) -> dict[str, Any]:
        found = checked(document, FORMAT, VERSION)
        if any(type(found.get(name, default)) is not type(default) for name, default in _CONTENT.items()):
            raise ValueError("its entries have other types")
        return found

    advice = f"restore it, or move it away: what was recorded stays, and the counts of {model} begin again"
    return read_json(captures_folder(home, model) / COUNTERS, counters, advice=advice) or {}


def write_document(folder: Path, document: Mapping[str, Any]) -> None:
    """Replaces counters.json; durable once this returns."""
    text = json.dumps({**document, "format": FORMAT, "version": VERSION})
    write_whole(folder / COUNTERS, text)


def last_number(home: Path, model: str) -> int:
    """The highest number of a part so far. The files count too, in case that counters.json was lost."""
    highest = int(read_document(home, model).get("last", 0))
    if highest:
        return highest
    folders = hour_folders(home, model)
    return max((part.last for folder in folders for part in parts_of_hour(folder)), default=0)


def commit(folder: Path, document: dict[str, Any], tables: Sequence[tuple[int, pa.Table]]) -> list[Part]:
    """Adds the rows of each version and replaces counters.json by `document`: both happen, or neither does.

    The caller holds the lock. After a crash `finish` completes what was decided.
    """
    finish(folder, document)
    number = int(document["last"])
    parts, publish = [], []
    try:
        for version, table in tables:
            for hour, rows in by_hour(table):
                number += 1
                place = _hour_folder(folder, version, hour)
                scratch = write_scratch(place, rows, [(number, rows.num_rows)])
                path = place / file_name(number, number, rows.num_rows)
                publish.append([str(each.relative_to(folder)) for each in (scratch, path)])
                parts.append(
                    Part(path=path, version=version, hour=hour, first=number, last=number, rows=rows.num_rows)
                )
        document = {**document, "last": number, "publish": publish}
        write_document(folder, document)
    except BaseException:
        for unfinished, _ in publish:
            (folder / unfinished).unlink(missing_ok=True)
        raise
    finish(folder, document)
    return parts


def finish(folder: Path, document: Mapping[str, Any]) -> None:
    """Gives the files of a commit their names, durably. May be repeated, at any time and without the lock."""
    places = set()
    for scratch, final in document.get("publish", ()):
        with suppress(FileNotFoundError):
            (folder / scratch).replace(folder / final)
        places.add((folder / final).parent)
    for place in places:  # also where another process gave the name: it may not be durable yet
        with suppress(FileNotFoundError):
            sync(place)


def finish_commit(home: Path, model: str) -> dict[str, Any]:
    """Finishes the last commit where its process was killed, or has not got so far: what counters.json counts can be
    read then. Returns the content of counters.json."""
    document, folder = read_document(home, model), captures_folder(home, model)
    if published(folder, document) < int(document.get("last", 0)):
        finish(folder, document)
    return document


def readable_document(home: Path, model: str) -> dict[str, Any]:
    """Does the same for a reader, who may not be allowed to write: then, what has no name yet is left out."""
    try:
        return finish_commit(home, model)
    except OSError:
        return read_document(home, model)


def published(folder: Path, document: Mapping[str, Any]) -> int:
    """The number up to which all parts are in place: a reader that looks while a commit is finished must not see a
    later part before an earlier one."""
    unfinished = [
        int(Path(final).name.split("-")[0])
        for scratch, final in document.get("publish", ())
        if (folder / scratch).exists()
    ]
    return min(unfinished) - 1 if unfinished else int(document.get("last", 0))


def write_scratch(folder: Path, table: pa.Table, parts: Sequence[tuple[int, int]]) -> Path:
    """Writes rows to an unfinished file in `folder`, durably."""
    scratch = folder / f"{SCRATCH}{secrets.token_hex(8)}"
    try:
        with scratch_writer(scratch, table.schema, parts) as writer:
            writer.write_table(table)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return scratch


class PartWriter:
    """Writes tables to a Parquet file, with the bytes that they take in memory."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer, self._bytes = writer, 0

    def write_table(self, table: pa.Table) -> None:
        self._bytes += table.nbytes
        self._writer.write_table(table, row_group_size=_GROUP_ROWS)

    def finish(self) -> None:
        self._writer.add_key_value_metadata({BYTES: str(self._bytes)})


@contextmanager
def scratch_writer(
    scratch: Path, schema: pa.Schema, parts: Sequence[tuple[int, int]]
) -> Iterator[PartWriter]:
    """A writer for the file at `scratch`, which is durable when the block ends."""
    metadata = {**(schema.metadata or {}), PARTS: json.dumps(parts).encode()}
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with (
        os.fdopen(descriptor, "wb") as file,
        pq.ParquetWriter(
            file, schema.with_metadata(metadata), compression="zstd", use_dictionary=_repeated(schema)
        ) as writer,
    ):
        made = PartWriter(writer)
        yield made
        made.finish()
    sync(scratch)


def _repeated(schema: pa.Schema) -> list[str]:
    """The columns that are written as dictionaries: to look for equal numbers or ids costs more than it saves."""
    return [each.name for each in schema if pa.types.is_string(each.type) and each.name not in _SINGLE]


def file_name(first: int, last: int, rows: int) -> str:
    return f"{first:012d}-{last:012d}-{rows}.parquet"


def _hour_folder(folder: Path, version: int, hour: str) -> Path:
    place = folder
    for name in (str(version), hour):
        if not (place / name).is_dir():
            make_private(place / name)
            sync(place)
        place /= name
    return place


def _entries(folder: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return [entry.name for entry in entries]
    return []


def hour_of(t: float) -> str:
    """The folder of requests that arrived at `t` (seconds since 1970)."""
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H")


def hour_began(hour: str) -> float:
    """Seconds since 1970 at the beginning of a folder's hour."""
    return datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC).timestamp()


def column_names(inputs: Sequence[str]) -> dict[str, str]:
    """What each request column is called in the records: its own name, unless that begins like one of the metadata."""
    taken = set(inputs)
    names = {}
    for name in inputs:
        own = name
        while own in METADATA or own.startswith(ANSWER) or (own != name and own in taken):
            own = f"request.{own}"
        names[name] = own
    return names


def complete(table: pa.Table) -> pa.Table:
    """The table with every metadata column first, in order and with its type."""
    columns: dict[str, Any] = {
        name: table.column(name).cast(kind) if name in table.column_names else pa.nulls(table.num_rows, kind)
        for name, kind in METADATA.items()
    }
    return pa.table(columns | {n: table.column(n) for n in table.column_names if n not in METADATA})


def by_hour(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows by their hour of arrival, oldest first, each hour's in the order of `table`."""
    hours = table.column("_t").cast(pa.int64()).to_numpy() // _HOUR_US
    for hour in np.unique(hours):
        chosen = table if (hours == hour).all() else table.filter(pa.array(hours == hour))
        yield hour_of(int(hour) * 3600), chosen
