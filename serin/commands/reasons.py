"""`serin explain` for recorded requests: one by its id, or all for which a condition is true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.api.recorded import Period, Reasons, RecordedAnswers
from serin.commands.explained import CLASSES, SHOWN_ROWS, show_row, show_unit, to_entry
from serin.commands.output import counted, show, show_json
from serin.commands.recording import records_of
from serin.errors import SpecError
from serin.expressions import ExpressionError
from serin.formats.rows import write_rows
from serin.machine import environment
from serin.store.store import Store
from serin.watcher.captures import shared_records


def explain_request(
    model: str, request: str, period: Period, *, row: int | None, out: Path | None, as_json: bool
) -> None:
    """Shows or writes the reasons of one request, of all its rows or of one."""
    found, count = _open(model, period).explain_request(request, period, row)
    if as_json and out is None:
        show_json([{**entry, "request_rows": count} for reasons in found for entry in _entries(reasons)])
        return
    if out is None:
        _show(found)
        return
    columns = list(dict.fromkeys(name for reasons in found for name in reasons.columns))
    with write_rows(out) as writer:
        for reasons in found:
            writer.write_table(reasons.table(columns))
    show(f"{counted(sum(map(len, found)), 'row')} of request {request} explained into {out}")


def explain_where(
    model: str, condition: str, period: Period, *, number: int | None, out: Path | None, as_json: bool
) -> None:
    """Writes the reasons of all recorded rows for which a condition is true, or shows those of the first."""
    recorded = _open(model, period)
    try:
        if out is not None:
            _write(recorded, condition, period, number, out)
            return
        rows = _first(recorded.where(condition, period), number or SHOWN_ROWS)
        found = [reasons for some in rows for reasons in recorded.explain(some)]
    except ExpressionError as error:
        raise SpecError(where="--where", problems=[("", str(error))]) from error
    if as_json:
        show_json([entry for reasons in found for entry in _entries(reasons)])
        return
    _show(found)
    if number is None and sum(map(len, found)) == SHOWN_ROWS:
        show(f"the first {SHOWN_ROWS} rows are shown; --out FILE writes all of them")


def _open(model: str, period: Period) -> RecordedAnswers:
    """The recorded answers of a model on all hosts. NotFound, or NotRecorded, when there are none."""
    records = records_of(model, period.version, shared_records(environment.home()))
    return RecordedAnswers(model, records, Store.open())


def _write(recorded: RecordedAnswers, condition: str, period: Period, number: int | None, out: Path) -> None:
    columns = recorded.columns(condition, period)
    seen = count = apart = 0
    with write_rows(out) as writer:
        for some in _first(recorded.where(condition, period), number):
            seen += some.num_rows
            for reasons in recorded.explain(some):
                writer.write_table(reasons.table(columns))
                count += len(reasons)
                apart += int((~reasons.agrees).sum())
    if count:
        show(f"{counted(count, 'recorded row')} explained into {out}")
    else:
        show("no recorded answer fits the condition; no file was written")
    if seen > count:
        show(f"{counted(seen - count, 'row')} without an answer left out; _status says what the client got")
    if apart:
        show(
            f"{counted(apart, 'answer')} computed again differ from the recorded ones: agrees is false there"
        )


def _first(tables: Iterable[pa.Table], number: int | None) -> Iterator[pa.Table]:
    """The first rows, or all."""
    left = number
    for table in tables:
        some = table if left is None else table.slice(0, left)
        yield some
        if left is not None:
            left -= some.num_rows
            if not left:
                return


def _show(found: list[Reasons]) -> None:
    if not found:
        show("no recorded answer fits the condition")
    left = SHOWN_ROWS
    for reasons in found:
        if left > 0:
            _show_reasons(reasons, left)
        left -= len(reasons)
    if left < 0:
        show(f"{counted(-left, 'more row')} are not shown; --out FILE writes all of them")


def _entries(reasons: Reasons) -> Iterator[dict[str, Any]]:
    """One for each row and output."""
    explanation, outputs = reasons.explanation, reasons.recorded.shape[1]
    for number, row in enumerate(explanation.rows()):
        at, output = divmod(number, outputs)
        record = reasons.record(at)
        yield {
            "id": record["_id"],
            **to_entry(row),
            "row": record["_row"],
            "t": record["_t"].isoformat(),
            "release": reasons.release.name,
            "recorded": float(reasons.recorded[at, output]),
            "difference": reasons.difference(at),
            "values": {each.column: each.value for each in row.contributions},
            "masked": reasons.hidden,
            "affected": reasons.affected,
            "sources": explanation.sources,
            "method": explanation.method,
            "scale": explanation.scale,
            "note": explanation.note,
        }


def _show_reasons(reasons: Reasons, most: int) -> None:
    explanation, likeliest = reasons.explanation, reasons.explanation.scale == CLASSES
    outputs = 1 if likeliest else reasons.recorded.shape[1]
    show(f"answered by {reasons.release.name}")
    show_unit(explanation)
    for number, row in enumerate(explanation.rows(likeliest=likeliest)):
        at = number // outputs
        if at == most:
            break
        record = reasons.record(at)
        show_row(row, f"request {record['_id']}, row {record['_row']}, {record['_t']:%Y-%m-%d %H:%M:%S} UTC")
        if difference := reasons.difference(at):
            show(f"  DIFFERENT: {difference}")
    for column, why in {**reasons.hidden, **reasons.affected}.items():
        show(f"{column} is {why}: what is shown is computed with null in its place")
    if explanation.note:
        show(explanation.note)
