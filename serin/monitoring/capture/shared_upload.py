"""Uploads a home's records to the store that several hosts share: new rows soon, and each hour as one file once it is
over.

A file is visible as a whole or not at all, and its key names its content, so whatever was cut short is done again with
the same outcome. At any time a reader of the store sees every uploaded row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

from serin.formats.captures import (
    Part,
    captures_folder,
    file_name,
    hour_began,
    in_force,
    parts_of_hour,
    published,
    read_document,
)
from serin.formats.shared_captures import (
    COUNTERS,
    Sharing,
    Writer,
    after_restore,
    begin_sharing,
    dump_counters,
    load_counters,
    write_sharing,
)
from serin.monitoring.capture.all_hosts import Folder, SharedRecords
from serin.monitoring.capture.merge import is_merged, merged
from serin.monitoring.capture.read import parts

_OVER_S: Final = 3600.0 + 900.0  # after its beginning an hour is over, and is merged in the home about now


def uploadable(home: Path, model: str) -> int:
    """The number up to which all parts are in place now."""
    return published(captures_folder(home, model), read_document(home, model))


class Uploader:
    """Uploads the records of one home. Only one process of a home has one."""

    def __init__(self, home: Path, records: SharedRecords, host: str) -> None:
        self._home, self._records, self._host = home, records, host
        self._compared: set[str] = set()  # models whose numbers were compared with the store's
        self._told: dict[str, bytes] = {}

    def upload(self, model: str, now: float, *, limit: int) -> None:
        """Uploads the parts up to the number `limit` that the store does not have, and replaces the small files of
        hours that are over. A file that is merged at the same moment ends it early: the next call finds its rows."""
        sharing = self._sharing(model)
        writer = Writer(model=model, host=self._host, id=sharing.writer)
        try:
            found = parts(self._home, model, after=str(sharing.last), until=limit)
            if found:
                self._add(writer, found)
                hours = {f"{part.version}/{part.hour}" for part in found}
                sharing = replace(sharing, last=found[-1].last, open=tuple(sorted({*sharing.open, *hours})))
                write_sharing(self._home, model, sharing)
            self._close_hours(writer, sharing, now)
        except FileNotFoundError:
            pass
        self._tell(writer)

    def _sharing(self, model: str) -> Sharing:
        sharing = begin_sharing(self._home, model)
        if model not in self._compared:
            writer = Writer(model=model, host=self._host, id=sharing.writer)
            found = self._records.files.read(writer.prefix + COUNTERS)
            theirs = 0 if found is None else int(load_counters(found.content).get("last", 0))
            if theirs > sharing.last:
                sharing = after_restore(self._home, model, sharing)
            self._compared.add(model)
        return sharing

    def _add(self, writer: Writer, found: Sequence[Part]) -> None:
        """Uploads new parts, those of an hour as one file."""
        by_hour = sorted(found, key=lambda part: (part.version, part.hour, part.last))
        for (version, hour), group in groupby(by_hour, key=lambda part: (part.version, part.hour)):
            own, folder = list(group), (writer, version, hour)
            numbers, rows = (own[0].first, own[-1].last), sum(part.rows for part in own)
            if own[0].path.name == file_name(*numbers, rows):
                self._records.create(folder, numbers, rows, own[0].path)
                continue
            with merged(captures_folder(self._home, writer.model), own) as path:
                self._records.create(folder, numbers, rows, path)

    def _close_hours(self, writer: Writer, sharing: Sharing, now: float) -> None:
        for place in sharing.open:
            version, _, hour = place.partition("/")
            if now - hour_began(hour) < _OVER_S:
                continue
            own = parts_of_hour(captures_folder(self._home, writer.model) / version / hour)
            if not is_merged(own) or any(part.last > sharing.last for part in own):
                continue  # not all is uploaded: the hour is closed later
            self._close((writer, int(version), hour), own)
            sharing = replace(sharing, open=tuple(each for each in sharing.open if each != place))
            write_sharing(self._home, writer.model, sharing)

    def _close(self, folder: Folder, own: Sequence[Part]) -> None:
        """Replaces the files of an hour in the store by those of the home, which was merged."""
        theirs = self._records.hour(folder)
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
                self._records.create(folder, (pair[0], pair[1]), part.rows, part.path)
                for part, pair in zip(own, numbers, strict=True)
            }
        for file in theirs:
            if file.key not in kept:
                self._records.files.remove(file.key)

    def _tell(self, writer: Writer) -> None:
        """Writes what others show of this home: after the files, so that `last` is never ahead of them."""
        sharing = begin_sharing(self._home, writer.model)
        content = dump_counters(read_document(self._home, writer.model), sharing.last)
        if self._told.get(writer.model) != content:
            self._records.files.put(writer.prefix + COUNTERS, content)
            self._told[writer.model] = content
