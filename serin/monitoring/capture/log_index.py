"""Finds lines of the request log by request id. Reads the log once, from front to back, and keeps a bounded number of
lines."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.serving.request_log import START, Offset, find_offset, read_lines
from serin.formats.serving.request_table import COLUMNS, request_table

MOST_LINES: Final = 400_000  # about 60 MB
_READ_BYTES: Final = 4 << 20
_FOUND: Final = ("arm", "epoch", "code", "us", "client_id")


class _Piece(NamedTuple):
    lines: pa.Table
    newest: float  # completion, seconds since 1970


class LogIndex:
    """The newest lines of the log. `at_end`: everything that was in the log at the last `read` has been read."""

    def __init__(self, log: Path, *, most_lines: int = MOST_LINES) -> None:
        self._log, self._most = log, most_lines
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
