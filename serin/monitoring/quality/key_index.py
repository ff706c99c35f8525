"""Says which hours of the records may hold the row of a label, so that a search reads only those.

It keeps a hash of 32 bits for each recorded row in memory, four bytes a row and at most 64 MB for a model; hours beyond
that are read in every search. Two keys with the same hash cost a read and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.hashing import hash_strings
from serin.formats.captures import captures_folder, parts_of_hour
from serin.formats.schema import Schema
from serin.monitoring.capture.read import captured_hour
from serin.monitoring.quality.keys import Key, captured_columns, captured_keys

MOST_ROWS: Final = 1 << 24

Hashes = npt.NDArray[np.uint32]


class KeyIndex:
    """The keys of a model's records, read when they are first asked for and again when an hour has changed."""

    def __init__(self, home: Path, model: str, most_rows: int = MOST_ROWS) -> None:
        self._home, self._model, self._most = home, model, most_rows
        self._known: dict[tuple[int, str, Key], tuple[tuple[str, ...], Hashes]] = {}
        self._rows = 0

    def may_have(self, version: int, hour: str, key: Key, schema: Schema, wanted: Hashes) -> bool:
        """Whether an hour may have a row with one of the keys whose hashes are `wanted` (sorted)."""
        if not len(wanted):
            return False
        here = self._hashes(version, hour, key, schema)
        place = np.minimum(np.searchsorted(wanted, here), len(wanted) - 1)
        return bool((wanted[place] == here).any())

    def _hashes(self, version: int, hour: str, key: Key, schema: Schema) -> Hashes:
        folder = captures_folder(self._home, self._model) / str(version) / hour
        files = tuple(part.path.name for part in parts_of_hour(folder))
        entry = version, hour, key
        before = self._known.get(entry)
        if before is not None and before[0] == files:
            return before[1]
        found = self._read(version, hour, key, schema)
        self._rows += len(found) - (0 if before is None else len(before[1]))
        if self._rows > self._most:
            self._rows -= len(found)
            self._known.pop(entry, None)
        else:
            self._known[entry] = files, found
        return found

    def _read(self, version: int, hour: str, key: Key, schema: Schema) -> Hashes:
        columns = captured_columns(key, schema)
        assert columns is not None, "the caller knows that requests of this version have the columns"
        table = captured_hour(self._home, self._model, version, hour, columns)
        if table is None:
            return np.zeros(0, np.uint32)
        return hashes(captured_keys(table, key, schema).drop_null())


def hashes(keys: pa.Array) -> Hashes:
    """The different hashes of keys, sorted."""
    return np.unique(hash_strings(keys))
