"""Cuts a table into pieces that fit. A row group larger than a piece is rewritten as small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import SourceUnreadable
from serin.etl.engines.memory_budget import MIN_ROWS
from serin.etl.sources.files import local_copy, open_parquet, origin_of
from serin.etl.sources.tables import Piece, Read, RowGroup, Table, cut
from serin.formats.dataset import SourceFile

_GIANT = 2  # a row group of more than so many pieces is cut


def cut_pieces(
    table: Table, reads: Sequence[Read], rows: int, scratch: Path, fitting: int = 0
) -> list[Piece]:
    """Pieces of about `rows` rows, in order; none has much more than twice as many, or than `fitting`.

    Rewriting a file costs more than the work it would distribute: half a table in one group is accepted, if it fits.
    """
    limit = max(_GIANT * max(rows, MIN_ROWS), min(fitting, table.rows // 2))
    giant = {group.file for group in table.groups if group.rows > limit}
    if giant:
        groups: list[RowGroup] = []
        for number, file in enumerate(dict.fromkeys(group.file for group in table.groups)):
            own = [group for group in table.groups if group.file == file]
            if file in giant:
                target = scratch / f"{table.name}-{number}-by-{rows}.parquet"
                own = _regrouped(file, own, reads, max(rows, MIN_ROWS), target)
            groups += own
        table = replace(table, groups=tuple(groups))
    return cut(table, rows)


def _regrouped(
    file: SourceFile, groups: Sequence[RowGroup], reads: Sequence[Read], rows: int, target: Path
) -> list[RowGroup]:
    """The columns in use of one file, copied batch by batch into row groups of `rows` rows."""
    given = {key for key, _ in file.partition}
    own = {read.name_in_file: read for read in reads if read.name_in_file not in given}
    names = list(own)
    texts = [name for name, read in own.items() if read.kind in ("string", "timestamp")]
    source = open_parquet(file, texts)
    schema = pa.schema([source.schema_arrow.field(name) for name in names])
    made: list[RowGroup] = []
    first_row = groups[0].first_row
    share = sum(group.bytes for group in groups) / max(1, sum(group.rows for group in groups))
    try:
        with pq.ParquetWriter(
            target, schema, compression="none", use_dictionary=texts, write_statistics=False
        ) as writer:
            indices = [group.index for group in groups]
            for batch in source.iter_batches(rows, row_groups=indices, columns=names, use_threads=False):
                for start in range(0, batch.num_rows, rows):
                    part = batch.slice(start, rows)
                    writer.write_table(
                        pa.Table.from_batches([part]).select(names).cast(schema), part.num_rows
                    )
                    made.append(
                        RowGroup(
                            file=file, index=len(made), first_row=first_row, rows=part.num_rows,
                            bytes=int(share * part.num_rows),
                        )
                    )  # fmt: skip
                    first_row += part.num_rows
    except (OSError, pa.ArrowException) as error:
        raise SourceUnreadable(table=file.table, path=origin_of(file).path, reason=str(error)) from error
    copy = local_copy(target, file)
    return [replace(group, file=copy) for group in made]
