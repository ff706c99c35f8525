"""Compares the answers of a candidate with what its own bundle computes, and with the recorded answers of the live
version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import pyarrow as pa

from serin.columns.segments import group_masks
from serin.errors import PredictionFailed
from serin.formats.bundle import MODEL, read_manifest
from serin.formats.schema import OutputTensor, Schema, read_schema
from serin.formats.wire import Array
from serin.monitoring.capture.columns import recorded_answers
from serin.rollout.decide.shadow import ALL_ROWS, Difference, Mismatch
from serin.scoring.predict import Scorer
from serin.serving.triton.verify import NO_DIFFERENCE, Allowed, allowed_difference, rows_near
from serin.spec.stored import stored_segments

Columns = Mapping[str, Array]
Ask = Callable[[Columns], dict[str, Array]]

_MOST_AGAIN: Final = 10  # requests that are asked again in one batch
_LONGEST_VALUE: Final = 100
_MOST_VALUES: Final = 60  # of a row that is shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """The rows of answered requests. `recorded`: as they are in the records; `request`: the number of each row's."""

    recorded: pa.Table
    request: Array
    columns: Columns
    served: Columns

    def only(self, rows: Array, served: Columns) -> Answered:
        """Returns some of the rows with other answers."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        recorded = self.recorded.take(pa.array(np.flatnonzero(rows)))
        return Answered(recorded=recorded, request=self.request[rows], columns=columns, served=served)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """`compared`: rows that the bundle computed; `unsteady`: those that were right only when they were asked again."""

    compared: int = 0
    unsteady: int = 0
    mismatch: Mismatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """What a candidate's answers are compared with. `compute`: its bundle's own graph; None: it has none."""

    schema: Schema
    segments: tuple[str, ...] = ()
    allowed: Allowed = NO_DIFFERENCE
    compute: Ask | None = None

    @classmethod
    def of(cls, bundle: Path) -> Self:
        graph = MODEL in read_manifest(bundle).files
        return cls(
            schema=read_schema(bundle),
            segments=stored_segments(bundle),
            allowed=allowed_difference(bundle) if graph else NO_DIFFERENCE,
            compute=Scorer(bundle, threads=1).wire_answers if graph else None,
        )

    def with_bundle(self, rows: Answered, ask: Ask) -> Compared:
        """Compares with the bundle. A request with a row that differs is asked once more: a mismatch is confirmed."""
        if self.compute is None:
            return Compared()
        computed = self.compute(rows.columns)
        wrong = ~_equal(rows.served, computed, self.allowed)
        unsteady = 0
        for request in np.unique(rows.request[wrong])[:_MOST_AGAIN]:
            chosen = rows.request == request
            columns = {name: values[chosen] for name, values in rows.columns.items()}
            try:
                again = rows.only(chosen, ask(columns))
            except PredictionFailed:
                continue
            wanted = {name: values[chosen] for name, values in computed.items()}
            still = ~_equal(again.served, wanted, self.allowed) & wrong[chosen]
            if still.any():
                found = self._mismatch(again, int(np.flatnonzero(still)[0]), wanted)
                return Compared(compared=len(wrong), unsteady=unsteady, mismatch=found)
            unsteady += int(wrong[chosen].sum())
        return Compared(compared=len(wrong), unsteady=unsteady)

    def with_live(self, rows: Answered) -> dict[str, Difference]:
        """Returns how the scores differ from the recorded ones, for all rows and for each segment."""
        found: dict[str, Difference] = {}
        segments = {ALL_ROWS: np.ones(len(rows.request), dtype=bool), **self._segments(rows.columns)}
        for output in self.schema.outputs:
            live, served = recorded_answers(rows.recorded, output), rows.served.get(output.name)
            if live is None or served is None or served.shape != live.shape:
                continue
            ours, theirs = (
                np.reshape(scores, (len(live), -1)).astype(np.float64) for scores in (served, live)
            )
            for place, element in enumerate(_elements(output, self.schema, ours.shape[1])):
                for segment, chosen in segments.items():
                    name = f"{segment}, {element}" if element else segment
                    found[name] = _difference(ours[chosen, place], theirs[chosen, place])
        return found

    def _segments(self, columns: Columns) -> dict[str, Array]:
        """Returns the rows of each segment, by its name."""
        flat = {name: pa.array(columns[name].reshape(-1)) for name in self.segments if name in columns}
        return group_masks(pa.table(flat), list(flat)) if flat else {}

    def _mismatch(self, rows: Answered, row: int, computed: Columns) -> Mismatch:
        one, wanted = (
            {name: values[row : row + 1] for name, values in part.items()} for part in (rows.served, computed)
        )
        name = next(name for name in wanted if not _equal(one, wanted, self.allowed, name).all())
        return Mismatch(
            request=str(rows.recorded.column("_id")[row].as_py()),
            row=int(rows.recorded.column("_row")[row].as_py()),
            segments=tuple(
                segment for segment, chosen in self._segments(rows.columns).items() if chosen[row]
            ),
            output=name,
            served=_shown(one[name]) if name in one else "nothing",
            computed=_shown(wanted[name]),
            values={
                column: _shown(values[row]) for column, values in list(rows.columns.items())[:_MOST_VALUES]
            },
        )


def _equal(served: Columns, computed: Columns, allowed: Allowed, only: str | None = None) -> Array:
    """Returns for each row whether the outputs are those of the bundle, within the tolerance of verification."""
    rows = len(next(iter(computed.values())))
    equal = np.ones(rows, dtype=bool)
    for name, wanted in computed.items():
        if only not in (None, name):
            continue
        given = served.get(name)
        if given is None or given.shape != wanted.shape:
            return np.zeros(rows, dtype=bool)
        equal &= rows_near(name, given, computed, allowed)
    return equal


def _elements(output: OutputTensor, schema: Schema, width: int) -> Sequence[str]:
    """Returns the names of the numbers in an output; empty for the only one."""
    if output.name == "probabilities" and schema.classes and len(schema.classes) == width:
        return schema.classes
    if output.name == "score" and schema.targets and len(schema.targets) == width:
        return schema.targets
    if width == 1:
        return ("",) if len(schema.outputs) == 1 else (output.name,)
    return [f"{output.name}[{place}]" for place in range(width)]


def _difference(ours: Array, theirs: Array) -> Difference:
    known = np.isfinite(theirs)
    both = known & np.isfinite(ours)
    away = ours[both] - theirs[both]
    return Difference(
        rows=int(both.sum()),
        live=float(np.abs(theirs[both]).sum()),
        signed=float(away.sum()),
        absolute=float(np.abs(away).sum()),
        lost=int((known & ~both).sum()),
    )


def _shown(value: Array) -> str:
    flat = np.asarray(value).reshape(-1).tolist()
    text = str(flat[0]) if len(flat) == 1 else str(flat)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
