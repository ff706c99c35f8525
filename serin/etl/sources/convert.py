"""Converts CSV, JSON lines and Arrow files to Parquet, so that later steps read one format, in pieces."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources.arrow2parquet import read_arrow
from serin.etl.sources.csv2parquet import read_csv
from serin.etl.sources.files import file_format, remote_errors
from serin.etl.sources.json2parquet import read_json
from serin.etl.sources.malformed import broken_text
from serin.formats.dataset import SourceFile

_FULL = (errno.ENOSPC, errno.EDQUOT)
_GROUP_ROWS = 2**18
_READERS = {"csv": read_csv, "json": read_json, "arrow": read_arrow}


def convert(file: SourceFile, target: Path) -> None:
    """Writes the file's rows to `target`; SourceUnreadable names the row that cannot be read."""
    found = file_format(file)
    assert found is not None
    try:
        _READERS[found](file, partial(write_groups, target))
    except FileNotFoundError:
        raise SourceMissing(table=file.table, path=file.path) from None
    except remote_errors() as error:
        raise SourceUnreadable(table=file.table, path=file.path, reason=str(error)) from error
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) in _FULL:  # it was the writing that failed
            raise
        raise broken_text(file, error) from error


def write_groups(target: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """The batches as one Parquet file with row groups of even size."""
    with pq.ParquetWriter(target, schema, compression="lz4", write_page_checksum=True) as writer:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(each.num_rows for each in held) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(held, schema), row_group_size=_GROUP_ROWS)
                held = []
        if held:
            writer.write_table(pa.Table.from_batches(held, schema), row_group_size=_GROUP_ROWS)
