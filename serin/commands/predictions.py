"""Scores rows: through the gateway like any client, or in this process without it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.csv as pacsv

from serin.commands.output import counted
from serin.errors import PredictionFailed, RowsUnfit
from serin.formats.bundle import with_answers
from serin.formats.rows import RowWriter, flat, read_rows, write_rows
from serin.formats.schema import Schema, read_schema
from serin.formats.windows import read_windows
from serin.formats.wire import to_wire
from serin.machine import environment
from serin.machine.hardware import core_count
from serin.pipeline.score import BulkDevice, open_bundle, placed, records_of
from serin.store.artifacts import Bundle

if TYPE_CHECKING:
    from serin.monitoring.capture.bulk import BulkRecords

_IDS = "_id", "_row"

__all__ = ["open_bundle", "predict_in_bulk", "predict_through_gateway"]

logger = logging.getLogger(__name__)


def predict_through_gateway(
    bundle: Bundle,
    rows: Path,
    out: Path | None,
    *,
    pinned: bool,
    protocol: Literal["http", "grpc"],
    ids: bool = False,
) -> int:
    """Scores rows as clients do; `pinned` calls the bundle's version, else the gateway chooses. `ids`: the result also
    has the request's id and the number of the row in it, by which labels are joined. Returns the number of rows."""
    from serin.host.guard import read_guard
    from serin.host.state import running_stack
    from serin.host.wiring import build_gateway
    from serin.serving.client.client import predict
    from serin.serving.triton.installation import NO_FILTER
    from serin.serving.triton.repository import serving_settings

    home = environment.home()
    url = running_stack(home).gateway_url
    guard = read_guard(home)
    if guard.tls or guard.keys_required is not False:  # the owner's own socket needs neither
        url = f"unix:{build_gateway(home).inside}"
    if protocol == "grpc" and guard.lacks_filter:
        raise PredictionFailed(model=bundle.model, status="UNIMPLEMENTED", reason=NO_FILTER)
    schema, plan = read_schema(Path(bundle.path)), read_windows(Path(bundle.path))
    if plan is not None:
        schema = replace(schema, inputs=plan.sent(schema.inputs))
    patience_s = max(10.0, serving_settings(bundle).request_timeout + 1.0)  # the gateway answers before that

    def ask(piece: pa.Table) -> pa.Table:
        version = bundle.version if pinned else None
        asked = to_wire(piece, schema)
        answer = predict(url, bundle.model, asked, schema, protocol, version, timeout_s=patience_s)
        scored = with_answers(piece, answer, schema)
        if not ids:
            return scored
        for name, values in zip(_IDS, (answer.request_id, answer.request_row), strict=True):
            scored = scored.append_column(name, pa.array(values))
        return scored

    return _score(ask, rows, schema, out, Path(bundle.path), own=_IDS if ids else ())


def predict_in_bulk(
    bundle: Bundle,
    rows: str,
    out: Path | str | None,
    *,
    scheduler: str | None,
    workers: int | None = None,
    device: BulkDevice = "cpu",
) -> int:
    """Scores with the bundle's own graph, on this machine or a Dask cluster. Returns the number of rows.

    `rows`: a file, a folder of files or a glob, also at a URL. `out`: a file, or a folder (without a suffix) or a URL
    for a file per piece; such a result is completed by another run after the first was killed. `workers`: one for each
    core by default.
    """
    from serin.scoring.bulk import find_pieces, score_into_folder, score_pieces
    from serin.scoring.parts import is_url, read_parts

    pieces, folder = find_pieces(rows), Path(bundle.path)
    count = workers or core_count()
    records = records_of(bundle)
    with placed(bundle, device, scheduler) as held:
        if out is not None and (is_url(out) or not Path(out).suffix):
            done = score_into_folder(
                folder,
                pieces,
                out,
                workers=count,
                scheduler=scheduler,
                place=held.place,
                digest=bundle.digest,
            )
            if records is not None:
                for number, table in enumerate(read_parts(str(out))):
                    records.add(table, number)
        else:
            with _writer(None if out is None else Path(out)) as writer:
                tee = writer if records is None else _Recorded(writer, records)
                done = score_pieces(
                    folder,
                    pieces,
                    tee,
                    workers=count,
                    scheduler=scheduler,
                    place=held.place,
                    digest=bundle.digest,
                )
    if records is not None:
        records.finish()
    return done


def _score(
    score: Callable[[pa.Table], pa.Table],
    rows: Path,
    schema: Schema,
    out: Path | None,
    bundle: Path,
    own: Sequence[str] = (),
) -> int:
    """`own`: the columns that are added beside the answers."""
    done = 0
    with _writer(out) as writer:
        for piece in filter(len, read_rows(rows, schema, bundle)):
            clash = {*own, *(output.name for output in schema.outputs)} & set(piece.column_names)
            if clash:
                reason = "has the name of a column of the result; rename or drop it"
                raise RowsUnfit(column=min(clash), reason=reason)
            writer.write_table(score(piece))
            done += len(piece)
            logger.info(f"scored {counted(done, 'row')}")
        if not done:
            raise RowsUnfit(column="", reason=f"in {rows} has no rows")
    return done


class _Recorded:
    """Writes tables and records their rows."""

    def __init__(self, writer: RowWriter, records: BulkRecords) -> None:
        self._writer, self._records, self._pieces = writer, records, 0

    def write_table(self, table: pa.Table) -> None:
        self._writer.write_table(table)
        self._records.add(table, self._pieces)
        self._pieces += 1


class _Terminal:
    """Writes CSV to stdout, with one header."""

    def __init__(self) -> None:
        self._begun = False

    def write_table(self, table: pa.Table) -> None:
        options = pacsv.WriteOptions(include_header=not self._begun)
        pacsv.write_csv(flat(table), sys.stdout.buffer, options)
        self._begun = True


@contextmanager
def _writer(out: Path | None) -> Iterator[RowWriter]:
    if out is None:
        yield _Terminal()
        return
    with write_rows(out) as writer:
        yield writer
