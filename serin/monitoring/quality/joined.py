"""Labelled rows on disk: watch/quality/<model>/<version>/<day>.parquet (UTC), with what metrics need and no more.

A row has one label, the newest by `when`. A file is replaced as a whole, and adding the same rows again changes
nothing, so work that was interrupted is simply done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.formats.captures import open_part
from serin.machine.durable import sync
from serin.machine.private import make_private
from serin.monitoring.quality.keys import ID, ROW, TIME
from serin.monitoring.quality.state import day_of
from serin.monitoring.quality.store import WHEN, write_table

_DAY_US = 86_400_000_000


class JoinedRows:
    """The labelled rows of a model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, version: int, rows: pa.Table) -> pa.Table:
        """Adds labelled rows. Returns those that had no label before, each once."""
        fresh = []
        for day, part in _by_day(rows):
            path = self._folder / str(version) / f"{day}.parquet"
            had = pq.read_table(path) if path.is_file() else None
            both = part if had is None else pa.concat_tables([had, part], promote_options="permissive")
            codes = _row_codes(both)
            places = _newest(both, codes)
            kept = both.take(pa.array(places))
            order = pc.sort_indices(kept, [(TIME, "ascending"), (ID, "ascending"), (ROW, "ascending")])
            places, kept = places[order.to_numpy()], kept.take(order)  # the same numbers whatever the arrival
            known = np.zeros(len(places), bool)
            known[codes[: had.num_rows if had is not None else 0]] = True
            fresh.append(kept.filter(pa.array(~known[codes[places]])))
            if had is None or not kept.equals(had):
                make_private(path.parent)
                write_table(path, kept)
        return pa.concat_tables(fresh, promote_options="permissive")

    def versions(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def read(
        self, version: int, columns: Sequence[str] | None = None, *, most: int | None = None
    ) -> pa.Table | None:
        """The labelled rows of a version, oldest day first; of more than `most`, the newest days that fit."""
        tables: list[pa.Table] = []
        rows = 0
        for path in reversed(self._files(version)):
            with open_part(path) as file:
                known = file.schema_arrow.names
                table = file.read(None if columns is None else [n for n in columns if n in known])
            if most is not None and tables and rows + table.num_rows > most:
                break
            tables.append(table)
            rows += table.num_rows
        return pa.concat_tables(tables[::-1], promote_options="permissive") if tables else None

    def delete_before(self, moment: float) -> None:
        for version in self.versions():
            for path in self._files(version):
                if path.stem < day_of(moment):
                    path.unlink(missing_ok=True)

    def filter(self, keep: Callable[[pa.Table], npt.NDArray[np.bool_]]) -> int:
        """Deletes the rows that `keep` says no to. Returns their number."""
        gone = 0
        for version in self.versions():
            for path in self._files(version):
                table = pq.read_table(path)
                kept = keep(table)
                if kept.all():
                    continue
                gone += int(np.count_nonzero(~kept))
                if kept.any():
                    write_table(path, table.filter(pa.array(kept)))
                else:
                    path.unlink()
                    sync(path.parent)
        return gone

    def _files(self, version: int) -> list[Path]:
        folder = self._folder / str(version)
        return sorted(folder.glob("*.parquet")) if folder.is_dir() else []


def _by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    days = np.asarray(rows.column(TIME).cast(pa.int64()), np.int64) // _DAY_US
    for day in np.unique(days).tolist():
        chosen = rows if (days == day).all() else rows.filter(pa.array(days == day))
        yield day_of(day * 86_400.0), chosen


def _row_codes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """A number for each different row of a request, from 0."""
    ids = rows.column(ID).cast(pa.string()).fill_null("")
    keys = pc.binary_join_element_wise(ids, rows.column(ROW).cast(pa.string()), "\x1f").combine_chunks()
    return np.asarray(keys.dictionary_encode().indices, np.int64)


def _newest(rows: pa.Table, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places of the newest label of each row, in the order of `rows`."""
    order = np.argsort(np.asarray(rows.column(WHEN), np.int64), kind="stable")
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    last[codes[order]] = order
    return np.sort(last)
