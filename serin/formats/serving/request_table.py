"""Lines of the request log as an Arrow table: several times as fast as one object per request."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from serin.formats.serving.request_log import parse_requests

COLUMNS: Final = pa.schema(
    [
        ("t", pa.float64()),  # arrival, seconds since 1970
        ("id", pa.string()),
        ("client_id", pa.string()),
        ("arm", pa.string()),
        ("epoch", pa.int64()),
        ("release", pa.string()),
        ("code", pa.int64()),
        ("us", pa.float64()),
    ]
)
_AS_LOGGED: Final = pa.schema(
    [("t", pa.string()), *(field for field in COLUMNS if field.name != "t")]  # Envoy writes t as a string
)
_BLOCK_BYTES: Final = 1 << 22


def request_table(data: bytes) -> pa.Table:
    """The requests in whole lines, with COLUMNS. Requests that reached no release are left out."""
    if not data:
        return COLUMNS.empty_table()
    read = pajson.ReadOptions(use_threads=False, block_size=max(_BLOCK_BYTES, data.find(b"\n") + 1))
    parse = pajson.ParseOptions(explicit_schema=_AS_LOGGED, unexpected_field_behavior="ignore")
    try:
        table = pajson.read_json(pa.BufferReader(data), read, parse)
        t = table.column("t").cast(pa.float64())
    except pa.ArrowException:  # a broken line, or a number that Envoy wrote as a string
        return _one_by_one(data)
    table = table.set_column(0, "t", t).cast(COLUMNS)
    release = table.column("release")
    return table.filter(pc.and_(pc.is_valid(release), pc.not_equal(release, "-")))


def _one_by_one(data: bytes) -> pa.Table:
    requests, _ = parse_requests(data)
    names = COLUMNS.names
    columns = {name: [getattr(request, name, None) for request in requests] for name in names}
    return pa.table(columns, schema=COLUMNS)
