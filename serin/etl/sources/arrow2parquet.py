"""Reads Arrow files: the file format (which Feather is) and the stream format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from serin.etl.sources.files import open_file
from serin.formats.dataset import SourceFile

Write = Callable[[pa.Schema, Iterable[pa.RecordBatch]], None]


def read_arrow(file: SourceFile, write: Write) -> None:
    try:
        reader = pa.ipc.open_file(open_file(file.path))
    except pa.ArrowInvalid:
        stream = pa.ipc.open_stream(open_file(file.path))
        write(stream.schema, stream)
        return
    write(reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches)))
