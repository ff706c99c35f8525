"""Records rows that were scored in bulk, like requests: the same columns, masks and limits, and lots by id.

About a thousand rows are one request, whose id is made of the run, the piece of the input and the place in it. All rows
of a run have one time: a table may be sorted, so its first rows say nothing about drift without its last.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.formats.captures import (
    ANSWER,
    BULK,
    column_names,
    commit,
    complete,
    last_number,
    read_document,
    writing,
)
from serin.formats.nulls import TYPE_OF_KIND, from_wire
from serin.formats.schema import Schema
from serin.formats.serving.lots import is_drawn
from serin.formats.wire import wire_column
from serin.monitoring.capture.columns import listed
from serin.monitoring.capture.counters import Counters
from serin.monitoring.capture.retention import HomeHours, expire
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release

log = logging.getLogger(__name__)

REQUEST_ROWS = 1000
_COMMIT_ROWS = 1 << 16


class BulkRecords:
    """The records of one run of bulk scoring. A record that cannot be written does not fail the run."""

    def __init__(
        self,
        home: Path,
        release: Release,
        schema: Schema,
        settings: CaptureSpec,
        *,
        run: str | None = None,
        known: Collection[str] = (),
    ) -> None:
        """`run`: the name of a scheduled run, the same when it is repeated; None: a batch that somebody scores once.
        `known`: ids of requests that an earlier attempt has recorded."""
        self._home, self._release, self._schema, self._settings = home, release, schema, settings
        self._run, self._source = (run, BULK) if run else (f"bulk-{secrets.token_hex(6)}", "batch")
        self._time = pa.scalar(round(time.time() * 1e6), pa.int64()).cast(pa.timestamp("us", "UTC"))
        self._known = known
        self._waiting: list[pa.Table] = []
        self._requests = 0
        self._failed = False

    def add(self, scored: pa.Table, piece: int) -> None:
        """Records rows of the piece with this number: the request columns and, behind them, the answers."""
        chosen, ids, places = self._draw(scored.num_rows, piece)
        if not len(chosen) or self._failed:
            return
        self._waiting.append(self._table(scored.take(pa.array(chosen)), ids, places))
        self._requests += len(set(ids))
        if sum(table.num_rows for table in self._waiting) >= _COMMIT_ROWS:
            self._flush()

    def finish(self) -> bool:
        """Writes what is left and keeps the model's records within their limits. Returns whether all were written."""
        self._flush()
        try:
            expire(HomeHours(self._home, self._release.model), self._settings, time.time())
        except OSError as error:
            log.warning("old records cannot be deleted: %s", error)
        return not self._failed

    def _flush(self) -> None:
        if not self._waiting or self._failed:
            return
        try:
            self._write(pa.concat_tables(self._waiting), self._requests)
        except (OSError, pa.ArrowException) as error:
            self._failed = True
            log.warning("the rows are scored, but not recorded: %s", error)
        self._waiting, self._requests = [], 0

    def _draw(self, count: int, piece: int) -> tuple[np.ndarray[Any, Any], list[str], np.ndarray[Any, Any]]:
        """The rows that are recorded, with the id of their request and their place in it."""
        chosen, ids = [np.zeros(0, np.int64)], []
        for number, start in enumerate(range(0, count, REQUEST_ROWS)):
            own = f"{self._run}-{piece:05d}-{number:05d}"
            if own not in self._known and is_drawn(own, self._settings.share):
                chosen.append(np.arange(start, min(start + REQUEST_ROWS, count)))
                ids += [own] * len(chosen[-1])
        rows = np.concatenate(chosen)
        return rows, ids, (rows % REQUEST_ROWS).astype(np.int32)

    def _table(self, rows: pa.Table, ids: list[str], places: np.ndarray[Any, Any]) -> pa.Table:
        columns: dict[str, Any] = {
            "_id": pa.array(ids, pa.string()),
            "_row": pa.array(places, pa.int32()),
            "_t": pa.repeat(self._time, rows.num_rows),
            "_release": pa.repeat(self._release.name, rows.num_rows),
            "_source": pa.repeat(self._source, rows.num_rows),
        }
        return complete(pa.table({**columns, **dict(self._inputs(rows)), **dict(self._answers(rows))}))

    def _inputs(self, rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
        names = column_names([column.name for column in self._schema.inputs])
        for column in self._schema.inputs:
            kind, width = TYPE_OF_KIND[column.kind], int(np.prod(column.dims))
            if column.name in self._settings.drop:
                continue
            if column.name in self._settings.mask:
                values = pa.nulls(rows.num_rows, kind if width == 1 else pa.list_(kind))
            else:
                wire = wire_column(rows.column(column.name), column).reshape(-1)
                plain = pa.array(wire, pa.string()) if column.kind == "string" else wire
                flat = from_wire(column.kind, plain, column.null_texts)
                values = listed(flat, rows.num_rows, width)
            yield names[column.name], values

    def _answers(self, rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
        for output in self._schema.outputs:
            values = rows.column(output.name).combine_chunks()
            if pa.types.is_fixed_size_list(values.type):
                values = values.cast(pa.list_(values.type.value_type))
            yield f"{ANSWER}{output.name}", values

    def _write(self, table: pa.Table, requests: int) -> None:
        model = self._release.model
        with writing(self._home, model) as folder:
            document = {**read_document(self._home, model), "last": last_number(self._home, model)}
            counters = Counters.of(document)
            counts = counters.release(self._release.name)
            counts.requests += requests
            counts.rows += table.num_rows
            commit(folder, counters.into(document), [(self._release.version, table)])
