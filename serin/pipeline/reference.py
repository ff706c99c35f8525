"""A table that live rows of a server elsewhere are compared with: recorded rows (`serin captures export`), or any
others that have the request columns, and the answers in columns that begin with `_answer_`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.columns.column import Array
from serin.columns.segments import segment_masks
from serin.errors import LabelsUnfit, RowsUnfit, SpecError
from serin.export.drift.build import reference_statistics
from serin.export.gate.quality import MINUTE_S, measure_scores, time_block_s
from serin.formats.captures import ANSWER, LIVE
from serin.formats.drift import DriftStatistics
from serin.formats.nulls import from_wire
from serin.formats.quality import QualityReference
from serin.formats.schema import Schema
from serin.formats.wire import TrainingRows, wire_column
from serin.monitoring.quality.keys import SOURCE, TIME
from serin.monitoring.quality.labels import TruthOf, read_truth
from serin.monitoring.quality.measure import scored
from serin.monitoring.quality.scan import Watched, answer_of
from serin.monitoring.quality.store import ARRIVED, LABEL
from serin.spec.pipeline import PipelineSpec

_ROWS = 500_000


class ReferenceRows:
    """The rows of a Parquet file, in the order of time where they have one (`_t`), at most half a million. SpecError
    for a file that cannot be read, or lacks a column that is needed."""

    def __init__(self, path: Path, spec: PipelineSpec, schema: Schema) -> None:
        self._path, self._spec, self._schema = path, spec, schema
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise self._problem(f"cannot be read as Parquet: {error}") from error
        if SOURCE in table.column_names:
            table = table.filter(pc.equal(table.column(SOURCE), LIVE))
        if TIME in table.column_names:
            table = table.sort_by(TIME)
        if not table.num_rows:
            raise self._problem("has no rows that a client sent")
        self._total = table.num_rows
        self._table = table.take(pa.array(np.arange(0, self._total, -(-self._total // _ROWS))))

    def _problem(self, text: str) -> SpecError:
        return SpecError(where=str(self._path), problems=[("--reference", text)])

    @cached_property
    def times(self) -> Array | None:
        """Seconds since 1970; None where rows have no time."""
        if TIME not in self._table.column_names:
            return None
        moments = self._table.column(TIME).cast(pa.timestamp("us")).cast(pa.int64())
        return np.asarray(moments, np.float64) / 1e6

    def drift(self) -> DriftStatistics:
        capture, wanted = self._spec.monitoring.capture, self._spec.monitoring.drift
        assert wanted is not None
        hidden = {*capture.mask, *capture.drop}
        columns = {}
        for column in self._schema.inputs:
            named = wanted.columns is None or column.name in (*wanted.columns, *self._spec.export.segments)
            if column.name not in hidden and named and column.dims == (1,):
                columns[column.name] = pa.chunked_array([self._natural(column.name)])
        answers = {f"{ANSWER}{output.name}" for output in self._schema.outputs}
        for name in answers.intersection(self._table.column_names):
            columns[name] = self._table.column(name)
        rows = TrainingRows(table=pa.table(columns), times=self.times, total=self._total)
        return reference_statistics(self._spec, self._schema, rows)

    def _wire(self, name: str) -> Array:
        (column,) = [each for each in self._schema.inputs if each.name == name]
        if name not in self._table.column_names:
            raise self._problem(f"has no column {name!r}, which requests have")
        try:
            return wire_column(self._table.column(name), column).reshape(-1)
        except RowsUnfit as error:
            raise self._problem(str(error)) from error

    def _natural(self, name: str) -> pa.Array:
        (kind,) = [each.kind for each in self._schema.inputs if each.name == name]
        values = self._wire(name)
        return from_wire(kind, pa.array(values, pa.string()) if kind == "string" else values)

    def quality(self) -> QualityReference:
        spec, schema = self._spec, self._schema
        answer = answer_of(schema)
        if answer is None or f"{ANSWER}{answer}" not in self._table.column_names:
            raise self._problem(f"has no column {ANSWER}{answer or 'score'} with the server's answers")
        try:
            truth, known = read_truth(self._table, TruthOf(model=spec.name, data=spec.data, schema=schema))
        except LabelsUnfit as error:
            raise self._problem(str(error)) from error
        zeros = pa.array(np.zeros(len(self._table), np.int64))
        moments = zeros if self.times is None else pa.array((self.times * 1e6).astype(np.int64))
        rows = pa.table(
            {
                f"{ANSWER}{answer}": self._table.column(f"{ANSWER}{answer}"),
                LABEL: truth,
                TIME: moments,
                ARRIVED: zeros,
            }
        ).filter(pa.array(known))
        if not rows.num_rows:
            raise self._problem("has no row whose target is known")
        found = scored(rows, Watched(version=0, schema=schema, data=spec.data), None)
        kept = np.flatnonzero(known)[found.known]
        segments = pa.table({name: self._wire(name)[kept] for name in spec.export.segments})
        return measure_scores(
            schema,
            found.truth,
            found.scores,
            segment_masks(segments, spec.export.segments),
            lambda losses: MINUTE_S if self.times is None else time_block_s(found.t, losses),
        )
