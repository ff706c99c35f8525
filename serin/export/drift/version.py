"""The drift statistics of a version that is being exported: which columns, on which rows, at what cost.

The training rows are read and joined once more, at most half a million of them, and scored for at most about a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from serin.columns.bins import count_rows
from serin.errors import ExportFailed, SpecError
from serin.export.champion import ReadRows
from serin.export.drift.build import complete_weeks, make_statistics
from serin.export.drift.choose_bins import Source
from serin.export.drift.tolerance import SAFETY
from serin.formats.drift import DriftSeries, DriftStatistics
from serin.formats.importance import Importance
from serin.formats.schema import OutputTensor, Schema
from serin.formats.wire import Array, TrainingRows
from serin.spec.monitoring import weeks_problem
from serin.spec.pipeline import PipelineSpec

logger = logging.getLogger(__name__)

_ROWS = 500_000
_FEWEST_ROWS = 50_000  # scored however long it takes
_SCORE_SECONDS = 60.0
_TEST_ROWS = 50_000
_TRIAL_ROWS = 2048
_COMPARABLE_ROWS = 200  # of a segment, among the test rows
_CLASSES = 10  # a model with more classes is watched by its label alone

Score = Callable[[pa.Table], Mapping[str, Array]]
ReadTraining = Callable[[int], TrainingRows]
"""At most so many training rows."""


def version_statistics(
    spec: PipelineSpec,
    schema: Schema,
    score: Score,
    importance: Importance | None,
    read: ReadTraining | None,
    read_rows: ReadRows | None,
) -> DriftStatistics | None:
    """The statistics; None when the spec does not watch drift. SpecError when the training period is too short to
    take tolerances from."""
    drift = spec.monitoring.drift
    if drift is None:
        return None
    if read is None or read_rows is None:
        raise ExportFailed(
            what="drift.json", reason="monitoring.drift needs rows of the tables, which are not available"
        )
    begun = time.monotonic()
    rows = read(_ROWS)
    problem = weeks_problem(complete_weeks(rows)) if drift.tolerance is None else None
    if problem is not None:
        raise SpecError(where=spec.name, problems=[problem])
    rows = rows.thinned(_step(rows, score))
    losses = {} if importance is None else {each.column: each.loss for each in importance.columns}
    found = make_statistics(
        replace(rows, table=_with_scores(rows.table, schema, score)),
        [*_requests(spec, schema), *_scores(schema)],
        segments=spec.export.segments,
        spec=drift,
        importance=losses,
    )
    found = cover_test_scores(found, _with_scores(read_rows(spec.features, _TEST_ROWS).table, schema, score))
    logger.info(
        f"drift statistics of {len(found.columns)} columns from {len(rows):,} of {rows.total:,} training rows in "
        f"{time.monotonic() - begun:.0f} s"
    )
    return found


def cover_test_scores(statistics: DriftStatistics, test: pa.Table) -> DriftStatistics:
    """The statistics with tolerances of scores that cover the difference between training rows and test rows: a model
    scores the rows that it was trained on differently."""
    counts = count_rows(statistics, test, np.zeros(len(test))).counts[0]
    ends = np.cumsum([len(each.share) for each in statistics.series])
    series = [
        _covering(each, own) if statistics.columns[each.column].source == "score" else each
        for each, own in zip(statistics.series, np.split(counts, ends[:-1]), strict=True)
    ]
    return replace(statistics, series=tuple(series))


def _covering(series: DriftSeries, counts: Array) -> DriftSeries:
    if counts.sum() < _COMPARABLE_ROWS:
        return series
    gap = SAFETY * np.abs(counts / counts.sum() - np.asarray(series.share))
    return replace(series, tolerance=tuple(np.maximum(series.tolerance, np.minimum(gap, 1.0)).tolist()))


def _with_scores(table: pa.Table, schema: Schema, score: Score) -> pa.Table:
    scored = score(table)
    for output in schema.outputs:
        table = table.append_column(_field(output), _answers(scored[output.name]))
    return table


def _step(rows: TrainingRows, score: Score) -> int:
    """Every how many rows are scored, a power of two."""
    trial = rows.table.slice(0, _TRIAL_ROWS)
    score(trial)  # the first run allocates
    begun = time.monotonic()
    score(trial)
    seconds = (time.monotonic() - begun) * len(rows) / max(len(trial), 1)
    step = 1
    while seconds / step > _SCORE_SECONDS and len(rows) // (2 * step) >= _FEWEST_ROWS:
        step *= 2
    return step


def _requests(spec: PipelineSpec, schema: Schema) -> Iterator[Source]:
    """The request columns that are recorded, as far as the spec wants them watched, and the segments."""
    drift, capture = spec.monitoring.drift, spec.monitoring.capture
    assert drift is not None
    wanted = None if drift.columns is None else {*drift.columns, *spec.export.segments}
    for column in schema.inputs:
        hidden = column.name in capture.mask or column.name in capture.drop
        if not hidden and (wanted is None or column.name in wanted):
            yield Source(name=column.name, field=column.name, source="request")


def _scores(schema: Schema) -> Iterator[Source]:
    for output in schema.outputs:
        wide = int(np.prod(output.dims))
        if wide == 1:
            yield Source(name=output.name, field=_field(output), source="score")
        elif schema.task != "multiclass" or wide <= _CLASSES:
            names = schema.classes or schema.targets or tuple(map(str, range(wide)))
            for place, name in enumerate(names):
                yield Source(
                    name=f"{output.name}[{name}]", field=_field(output), source="score", element=place
                )


def _field(output: OutputTensor) -> str:
    """The name of an answer in captured rows."""
    return f"_answer_{output.name}"


def _answers(values: Array) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    if flat.shape[1] == 1:
        return pa.array(flat[:, 0])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
