"""Moves requests from the spool to the records: each once, whenever it is killed, with bounded memory.

A file of the spool is recorded a little after it was completed, when the gateway's log has the lines of its requests.
The rows of several files and the numbers of those files are committed in one step (`formats.captures.commit`); then the
files are deleted. After a crash, files whose numbers are committed are deleted and not recorded again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from serin.errors import NameInvalid, SerinError, SpoolBroken
from serin.formats.captures import commit, last_number, read_document, write_document, writing
from serin.formats.serving.request_log import START, Offset, find_offset, parse_requests, read_lines
from serin.formats.serving.spool import SpoolFile, read_spool
from serin.formats.serving.spool_blocks import COMPLETE, OPEN
from serin.machine.locks import try_lock
from serin.monitoring.capture.columns import block_rows, text
from serin.monitoring.capture.counters import Counters
from serin.monitoring.capture.read import alike
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release

log = logging.getLogger(__name__)

FIRST = 1  # the number of a writer's first file
SETTLE_S = 2.0  # the gateway writes its log at least every second
BATCH_BYTES = 16 << 20  # of the spool, read and committed at once
_BEFORE_S = 15.0  # how long before a file's last write the requests in it may have ended
_BEYOND_S = 5.0
_RETRY_S = 20.0
_QUIET_S = 30.0  # a file of the spool is open for milliseconds
_EMPTY_S = 3600.0

Settings = Callable[[Release], CaptureSpec | None]
"""What a release's spec says about its records; None when the version no longer exists."""

MOST_LINES: Final = 400_000  # about 60 MB
_READ_BYTES: Final = 4 << 20
_FOUND: Final = ("arm", "epoch", "code", "us", "client_id")
COLUMNS: Final = pa.schema(
    [
        ("t", pa.float64()),  # arrival, seconds since 1970
        ("id", pa.string()),
        ("client_id", pa.string()),
        ("arm", pa.string()),
        ("epoch", pa.int64()),
        ("release", pa.string()),
        ("code", pa.int64()),
        ("us", pa.float64()),
    ]
)
_AS_LOGGED: Final = pa.schema(
    [("t", pa.string()), *(field for field in COLUMNS if field.name != "t")]  # Envoy writes t as a string
)
_BLOCK_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolEntry:
    """A complete file. `writer`: release and writer, as the folders are called. `modified`: seconds since 1970, never
    less than that of an earlier file of the same writer."""

    path: Path
    release: Release
    writer: str
    number: int
    bytes: int
    modified: float


@dataclass(slots=True)
class Outcome:
    """`requests`: recorded by one call. `failed`: models whose records cannot be written now, and why."""

    requests: int = 0
    failed: dict[str, Exception] = field(default_factory=dict)


class Recorder:
    """`log`: the gateway's. `settle_s`: how long a complete file waits for the log."""

    def __init__(
        self,
        home: Path,
        log: Path,
        settings: Settings,
        *,
        settle_s: float = SETTLE_S,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._settings = home, settings
        self._settle_s, self._batch_bytes, self._clock = settle_s, batch_bytes, clock
        self._index = LogIndex(log)
        self._seen: dict[Path, float] = {}
        self._failed: dict[str, tuple[float, Exception]] = {}

    def record(self, now: float) -> Outcome:
        """Records what is ready. What cannot be written stays in the spool and is tried again later."""
        clean_up(self._home, now)
        entries = complete_files(self._home)
        self._retry({entry.release.model for entry in entries})
        ready, waiting = self._split(entries)
        outcome = Outcome()
        for batch in self._with_log(ready, waiting, now):
            model = batch[0].release.model
            if model in self._failed:
                continue
            try:
                outcome.requests += self._record(batch)
            except (OSError, SerinError, pa.ArrowException) as error:
                self._failed[model] = self._clock(), error
        outcome.failed = {model: error for model, (_, error) in self._failed.items()}
        return outcome

    def _split(self, entries: Sequence[SpoolEntry]) -> tuple[list[SpoolEntry], list[SpoolEntry]]:
        """The files that are ready and those that wait. A writer's files become ready in their order."""
        began = self._clock()
        self._seen = {entry.path: self._seen.get(entry.path, began) for entry in entries}
        ready, waiting, held = [], [], set()
        for entry in entries:
            young = began - self._seen[entry.path] < self._settle_s
            if young or entry.writer in held or entry.release.model in self._failed:
                held.add(entry.writer)
                waiting.append(entry)
            else:
                ready.append(entry)
        return ready, waiting

    def _retry(self, models: set[str]) -> None:
        """Finds out, without reading anything, whether the records of models that failed can be written again."""
        for model, (t, _) in list(self._failed.items()):
            if model not in models:
                del self._failed[model]
            elif self._clock() - t >= _RETRY_S:
                try:
                    with writing(self._home, model) as folder:
                        write_document(folder, read_document(self._home, model))
                    del self._failed[model]
                    self._index.restart()  # to where the oldest file is
                except (OSError, SerinError) as error:
                    self._failed[model] = self._clock(), error

    def _with_log(
        self, ready: list[SpoolEntry], waiting: list[SpoolEntry], now: float
    ) -> Iterator[list[SpoolEntry]]:
        """Batches of files in order, each when the lines of its requests have been read as far as there are any."""
        first = min((entry.modified for entry in ready + waiting), default=now)
        self._index.read(first - _BEFORE_S)
        while ready:
            known = len(ready)
            if not self._index.at_end:  # a long backlog: in step with the log
                limit = self._index.newest - _BEYOND_S
                known = next((place for place, each in enumerate(ready) if each.modified > limit), known)
            yield from self._batches(ready[:known])
            ready = ready[known:]
            if ready:
                self._index.forget(ready[0].modified - _BEFORE_S)
                self._index.read(first)
        young = [entry.modified for entry in waiting if entry.release.model not in self._failed]
        self._index.forget(min(young, default=now) - _BEFORE_S)

    def _batches(self, entries: Sequence[SpoolEntry]) -> Iterator[list[SpoolEntry]]:
        """Files of one model, as many as are read at once."""
        by_model = sorted(entries, key=lambda entry: entry.release.model)  # stable: each model's in order
        for _, group in groupby(by_model, key=lambda entry: entry.release.model):
            batch: list[SpoolEntry] = []
            size = 0
            for entry in group:
                if batch and size + entry.bytes > self._batch_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(entry)
                size += entry.bytes
            yield batch

    def _record(self, batch: list[SpoolEntry]) -> int:
        model = batch[0].release.model
        with writing(self._home, model) as folder:
            document = read_document(self._home, model)
            document["last"] = last_number(self._home, model)
            counters = Counters.of(document)
            before = counters.requests
            fresh = [entry for entry in batch if entry.number > counters.writer(entry.writer).file]
            if fresh:
                rows = self._rows(fresh, counters)
                counters.limit_writers()
                commit(folder, counters.into(document), rows)
            for entry in batch:
                entry.path.unlink(missing_ok=True)
        return counters.requests - before

    def _rows(self, entries: Sequence[SpoolEntry], counters: Counters) -> list[tuple[int, pa.Table]]:
        """The rows of each version. The counters are brought up to date."""
        files = [(entry, file) for entry in entries if (file := _read(entry, counters)) is not None]
        ids = [text(block.ids) for _, file in files for block in file.blocks]
        logged = self._index.find(pa.concat_arrays([pa.array([], pa.string()), *ids]))
        tables: dict[int, list[pa.Table]] = {}
        place = 0
        for entry, file in files:
            settings = self._settings(entry.release)
            rows = []
            for block in file.blocks:
                lines = logged.slice(place, block.requests)
                place += block.requests
                if settings is not None and block.requests:
                    mask, drop = settings.mask, settings.drop
                    written = entry.modified
                    rows.append(block_rows(file.header, block, lines, mask=mask, drop=drop, written=written))
            _count(entry, file, rows, counters)
            tables.setdefault(entry.release.version, []).extend(rows)
        return [(version, alike(some)) for version, some in tables.items() if some]


def _read(entry: SpoolEntry, counters: Counters) -> SpoolFile | None:
    writer = counters.writer(entry.writer)
    lost, writer.file = writer.file < 0 and entry.number > FIRST, entry.number
    try:
        file = read_spool(entry.path)
        # The counts of its earlier files may be gone: nothing says then that any were dropped.
        if lost and file.blocks:
            writer.requests = file.blocks[-1].sent - sum(block.requests for block in file.blocks)
        return file
    except FileNotFoundError:
        return None
    except SpoolBroken as error:
        log.warning("%s; its requests are counted as dropped", error)
        counters.release(entry.release.name).damaged += 1
        return None


def _count(entry: SpoolEntry, file: SpoolFile, rows: list[pa.Table], counters: Counters) -> None:
    """Adds what a file holds. What its writer has drawn and is not recorded is lost: dropped by the writer, in a
    damaged file, or of a version that no longer exists."""
    writer, release = counters.writer(entry.writer), counters.release(entry.release.name)
    release.damaged += bool(file.torn_bytes)
    release.share = file.header.share
    requests = sum(block.requests for block in file.blocks) if rows else 0
    release.requests += requests
    release.rows += sum(table.num_rows for table in rows)
    writer.requests += requests
    if file.blocks:
        lost = max(0, file.blocks[-1].sent - writer.requests)
        release.dropped += lost - writer.lost
        writer.lost = lost


class _Piece(NamedTuple):
    lines: pa.Table
    newest: float  # completion, seconds since 1970


class LogIndex:
    """The newest lines of the log. `at_end`: everything that was in the log at the last `read` has been read."""

    def __init__(self, log: Path) -> None:
        self._log, self._most = log, MOST_LINES
        self._offset: Offset | None = None
        self._pieces: deque[_Piece] = deque()
        self.at_end = False

    @property
    def lines(self) -> int:
        return sum(piece.lines.num_rows for piece in self._pieces)

    @property
    def newest(self) -> float:
        """The newest completion of a request that has been read."""
        return max((piece.newest for piece in self._pieces), default=0.0)

    def restart(self) -> None:
        """Forgets everything; the next `read` begins where it is asked to."""
        self._offset = None
        self._pieces.clear()

    def read(self, since: float) -> None:
        """Reads on, until the log's end or as many lines as may be kept. The first time it begins with requests that
        arrived at `since`."""
        if self._offset is None:
            self._offset = self._place(since)
        self.at_end = False
        while self.lines < self._most:
            lines = read_lines(self._log, self._offset, max_bytes=_READ_BYTES)
            self._offset = lines.offset
            table = request_table(lines.data)
            if table.num_rows:
                ended = pc.add(table["t"], pc.divide(pc.fill_null(table["us"], 0.0), 1e6))
                self._pieces.append(_Piece(table, pc.max(ended).as_py() or 0.0))
            if not lines.more:
                self.at_end = True
                break

    def forget(self, before: float) -> None:
        """Drops lines of requests that ended before `before`; when there is no room for more, at least the oldest."""
        while self._pieces and (self._pieces[0].newest < before or self.lines >= self._most):
            self._pieces.popleft()

    def find(self, ids: pa.Array) -> pa.Table:
        """For each id what the log says about it, null where there is no line."""
        known = pa.concat_tables([COLUMNS.empty_table(), *(piece.lines for piece in self._pieces)])
        places = pc.index_in(ids, value_set=known["id"].combine_chunks())
        return known.select(list(_FOUND)).take(places)

    def _place(self, since: float) -> Offset:
        """The place in the rotated log if that one holds requests that arrived at `since`."""
        rotated = self._log.with_name(self._log.name + ".1")
        current = find_offset(self._log, since)
        if current != START or not rotated.exists():
            return current
        found = find_offset(rotated, since)
        if found != START:
            return found
        # The rotated log from its beginning. An offset names its file by the bytes that were read: at least one line.
        first = read_lines(rotated, START, max_bytes=1)
        table = request_table(first.data)
        if table.num_rows:
            self._pieces.append(_Piece(table, float(table["t"][0].as_py())))
        return first.offset


def request_table(data: bytes) -> pa.Table:
    """The requests in whole lines, with COLUMNS. Requests that reached no release are left out."""
    if not data:
        return COLUMNS.empty_table()
    read = pajson.ReadOptions(use_threads=False, block_size=max(_BLOCK_BYTES, data.find(b"\n") + 1))
    parse = pajson.ParseOptions(explicit_schema=_AS_LOGGED, unexpected_field_behavior="ignore")
    try:
        table = pajson.read_json(pa.BufferReader(data), read, parse)
        t = table.column("t").cast(pa.float64())
    except pa.ArrowException:  # a broken line, or a number that Envoy wrote as a string
        return _one_by_one(data)
    table = table.set_column(0, "t", t).cast(COLUMNS)
    release = table.column("release")
    return table.filter(pc.and_(pc.is_valid(release), pc.not_equal(release, "-")))


def _one_by_one(data: bytes) -> pa.Table:
    requests, _ = parse_requests(data)
    names = COLUMNS.names
    columns = {name: [getattr(request, name, None) for request in requests] for name in names}
    return pa.table(columns, schema=COLUMNS)


def complete_files(home: Path) -> list[SpoolEntry]:
    """All complete files, oldest first. Those of one writer are in the order of their numbers, whatever the clock
    did."""
    found: list[SpoolEntry] = []
    for release, folder in writer_folders(home):
        newest = 0.0
        for number, path in _numbered(folder, COMPLETE):
            with suppress(FileNotFoundError):
                status = path.stat()
                newest = max(newest, status.st_mtime)
                found.append(
                    SpoolEntry(
                        path=path,
                        release=release,
                        writer=f"{release.name}/{folder.name}",
                        number=number,
                        bytes=status.st_size,
                        modified=newest,
                    )
                )
    found.sort(key=lambda entry: (entry.modified, entry.writer, entry.number))
    return found


def writer_folders(home: Path) -> Iterator[tuple[Release, Path]]:
    for folder in _folders(home / "spool"):
        with suppress(NameInvalid):
            release = Release.parse(folder.name)
            for writer in _folders(folder):
                yield release, writer


def clean_up(home: Path, now: float) -> None:
    """Completes the files that were open when their writer died: it left them alone for long and holds no lock. Removes
    folders that have been empty for long; a writer that needs its folder makes it again."""
    for _, folder in writer_folders(home):
        for _, path in _numbered(folder, OPEN):
            _take_over(path, now)
        with suppress(OSError):
            if now - folder.stat().st_mtime > _EMPTY_S:
                folder.rmdir()


def waits(home: Path, model: str, before: float = math.inf) -> bool:
    """Whether the spool has requests of a model that were written before this time."""
    for release, folder in writer_folders(home):
        for _, path in (*_numbered(folder, COMPLETE), *_numbered(folder, OPEN)):
            with suppress(FileNotFoundError):
                if release.model == model and path.stat().st_mtime < before:
                    return True
    return False


def _take_over(path: Path, now: float) -> None:
    with suppress(FileNotFoundError):
        if abs(now - path.stat().st_mtime) < _QUIET_S:
            return
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(file):
                path.rename(path.with_suffix(COMPLETE))
        finally:
            os.close(file)


def _numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            stem = entry.name.removesuffix(suffix)
            if entry.name.endswith(suffix) and stem.isdigit():
                found.append((int(stem), Path(entry.path)))
    return sorted(found)


def _folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []
