"""Uploads a home's records to the store that several hosts share: new rows soon, and each hour as one file once it is
over.

A file is visible as a whole or not at all, and its key names its content, so whatever was cut short is done again with
the same outcome. At any time a reader of the store sees every uploaded row once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from serin.errors import ObjectExists, StoreUnreachable
from serin.formats.captures import (
    SCRATCH,
    Part,
    captures_folder,
    hour_began,
    part_map,
    parts_of_hour,
    published,
    read_document,
    scratch_writer,
)
from serin.formats.shared_captures import (
    COUNTERS,
    SharedFile,
    Sharing,
    Writer,
    after_restore,
    begin_sharing,
    dump_counters,
    file_key,
    in_force,
    load_counters,
    shared_files,
    write_sharing,
    writer_of,
)
from serin.monitoring.capture.merge import is_merged
from serin.monitoring.capture.read import common_schema, fitted, part_tables, parts
from serin.store.file_list import listed
from serin.store.objects import Files

_OVER_S: Final = 3600.0 + 900.0  # after its beginning an hour is over, and is merged in the home about now


def uploadable(home: Path, model: str) -> int:
    """The number up to which all parts are in place now."""
    return published(captures_folder(home, model), read_document(home, model))


class Uploader:
    """Uploads the records of one home. Only one process of a home has one."""

    def __init__(self, home: Path, files: Files, host: str) -> None:
        self._home, self._files, self._host = home, files, host
        self._compared: set[str] = set()  # models whose numbers were compared with the store's
        self._told: dict[str, bytes] = {}

    def upload(self, model: str, now: float, *, limit: int) -> int:
        """Uploads the parts up to the number `limit` that the store does not have, and replaces the small files of
        hours that are over. Returns how many rows were new. A file that is merged at the same moment ends it early:
        the next call finds its rows."""
        sharing = self._sharing(model)
        writer, rows = writer_of(model, self._host, sharing), 0
        try:
            found = up_to(limit, parts(self._home, model, after=str(sharing.last)), sharing.last)
            if found:
                rows = self._add(writer, found, sharing.last)
                hours = {f"{part.version}/{part.hour}" for part in found}
                last = max(part.last for part in found)
                sharing = replace(sharing, last=last, open=tuple(sorted({*sharing.open, *hours})))
                write_sharing(self._home, model, sharing)
            self._close_hours(writer, sharing, now)
        except FileNotFoundError:
            pass
        self._tell(writer)
        return rows

    def _sharing(self, model: str) -> Sharing:
        sharing = begin_sharing(self._home, model)
        if model not in self._compared:
            found = self._files.read(writer_of(model, self._host, sharing).prefix + COUNTERS)
            theirs = 0 if found is None else int(load_counters(found.content).get("last", 0))
            if theirs > sharing.last:
                sharing = after_restore(self._home, model, sharing)
            self._compared.add(model)
        return sharing

    def _add(self, writer: Writer, found: Sequence[Part], seen: int) -> int:
        """Uploads new parts, those of an hour as one file."""
        known = {file.key for file in self._listed(writer.prefix)}
        by_hour = sorted(found, key=lambda part: (part.version, part.hour, part.last))
        for (version, hour), group in groupby(by_hour, key=lambda part: (part.version, part.hour)):
            own = list(group)
            if len(own) == 1 and own[0].first > seen:
                self._create(writer, own[0], (own[0].first, own[0].last), known)
                continue
            with self._merged(writer.model, own, seen) as (path, numbers):
                rows = sum(part.rows for part in own)
                merged = Part(path=path, version=version, hour=hour, first=0, last=0, rows=rows)
                self._create(writer, merged, numbers, known)
        return sum(part.rows for part in found)

    @contextmanager
    def _merged(self, model: str, own: Sequence[Part], seen: int) -> Iterator[tuple[Path, tuple[int, int]]]:
        """A file with the rows of these parts, and the first and last of their numbers."""
        numbers = [entry for part in own for entry in part_map(part.path) if entry[0] > seen]
        schema = common_schema([pq.read_schema(part.path) for part in own])
        scratch = captures_folder(self._home, model) / f"{SCRATCH}{secrets.token_hex(8)}"
        try:
            with scratch_writer(scratch, schema, numbers) as file:
                for part in own:
                    tables = part_tables(part, schema.names)
                    if tables is None:
                        raise FileNotFoundError(part.path)
                    for table in tables:
                        file.write_table(fitted(table, schema))
            yield scratch, (numbers[0][0], numbers[-1][0])
        finally:
            scratch.unlink(missing_ok=True)

    def _create(self, writer: Writer, part: Part, numbers: tuple[int, int], known: set[str]) -> str:
        """Uploads a file unless the store has it; returns its key."""
        content = listed(part.path)
        assert content.sha256 is not None, "a file that is there has a digest"
        key = file_key(writer, part.version, part.hour, numbers, part.rows, content.sha256)
        if key not in known:
            create_once(self._files, key, part.path, content.size)
        return key

    def _close_hours(self, writer: Writer, sharing: Sharing, now: float) -> None:
        for place in sharing.open:
            version, _, hour = place.partition("/")
            if now - hour_began(hour) < _OVER_S:
                continue
            own = parts_of_hour(captures_folder(self._home, writer.model) / version / hour)
            if not is_merged(own) or any(part.last > sharing.last for part in own):
                continue  # not all is uploaded: the hour is closed later
            self._close(writer, own, self._listed(f"{writer.prefix}{version}/{hour}/"))
            sharing = replace(sharing, open=tuple(each for each in sharing.open if each != place))
            write_sharing(self._home, writer.model, sharing)

    def _close(self, writer: Writer, own: Sequence[Part], theirs: Sequence[SharedFile]) -> None:
        """Replaces the files of an hour in the store by those of the home, which was merged."""
        current = in_force(theirs)
        if not own or not current:
            return  # deleted here, or there
        kept = {file.key for file in current}
        if len(current) > len(own):
            # Rows may have been deleted at either end: the new files still have to replace all others.
            first, last = min(own[0].first, current[0].first), max(own[-1].last, current[-1].last)
            numbers = [[part.first, part.last] for part in own]
            numbers[0][0], numbers[-1][1] = first, last
            kept = {
                self._create(writer, part, (pair[0], pair[1]), {file.key for file in theirs})
                for part, pair in zip(own, numbers, strict=True)
            }
        for file in theirs:
            if file.key not in kept:
                self._files.remove(file.key)

    def _listed(self, prefix: str) -> list[SharedFile]:
        return shared_files(self._files.entries(prefix))

    def _tell(self, writer: Writer) -> None:
        """Writes what others show of this home: after the files, so that `last` is never ahead of them."""
        sharing = begin_sharing(self._home, writer.model)
        content = dump_counters(read_document(self._home, writer.model), sharing.last)
        if self._told.get(writer.model) != content:
            self._files.put(writer.prefix + COUNTERS, content)
            self._told[writer.model] = content


def up_to(limit: int, found: list[Part], seen: int) -> list[Part]:
    """The parts up to a number of which every earlier row is among them, too: a merged file may hold numbers before and
    after the limit."""
    chosen = [part for part in found if part.last <= limit]
    rest = [part for part in found if part.last > limit]
    first = min((_first_after(part, seen) for part in rest), default=limit + 1)
    while chosen and chosen[-1].last >= first:
        first = min(first, _first_after(chosen.pop(), seen))
    return chosen


def _first_after(part: Part, seen: int) -> int:
    return part.first if part.first > seen else min(n for n, _ in part_map(part.path) if n > seen)


def create_once(files: Files, key: str, path: Path, size: int) -> None:
    """Uploads a file under a key that names its content: one that is there already is the same."""
    try:
        files.create_file(key, path)
    except ObjectExists:
        if not any(entry.key == key and entry.size == size for entry in files.entries(key)):
            raise StoreUnreachable(
                url=files.url, reason=f"{key} is being written by another process"
            ) from None
