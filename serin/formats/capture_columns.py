"""The columns of recorded requests: metadata, request columns and answers, and the hour that a row belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

METADATA: Mapping[str, pa.DataType] = {
    "_id": pa.string(),  # made by the gateway; the run and partition in bulk scoring
    "_row": pa.int32(),  # of the request, from 0
    "_client_id": pa.string(),  # the client's own, not unique
    "_t": pa.timestamp("us", "UTC"),
    "_release": pa.string(),
    "_arm": pa.string(),
    "_epoch": pa.int64(),
    "_status": pa.int32(),  # HTTP
    "_latency_ms": pa.float32(),
    "_source": pa.string(),  # live, bulk or shadow
}
ANSWER: Final = "_answer_"
TYPE_OF_KIND: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "float": pa.float32(),
    "int": pa.int64(),
    "timestamp": pa.timestamp("us"),
    "bool": pa.bool_(),
}

_HOUR_US = 3_600_000_000


def hour_of(t: float) -> str:
    """The folder of requests that arrived at `t` (seconds since 1970)."""
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H")


def hour_began(hour: str) -> float:
    """Seconds since 1970 at the beginning of a folder's hour."""
    return datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC).timestamp()


def column_names(inputs: Sequence[str]) -> dict[str, str]:
    """What each request column is called in the records: its own name, unless that begins like one of the metadata."""
    taken = set(inputs)
    names = {}
    for name in inputs:
        own = name
        while own in METADATA or own.startswith(ANSWER) or (own != name and own in taken):
            own = f"request.{own}"
        names[name] = own
    return names


def complete(table: pa.Table) -> pa.Table:
    """The table with every metadata column first, in order and with its type."""
    columns: dict[str, Any] = {
        name: table.column(name).cast(kind) if name in table.column_names else pa.nulls(table.num_rows, kind)
        for name, kind in METADATA.items()
    }
    return pa.table(columns | {n: table.column(n) for n in table.column_names if n not in METADATA})


def by_hour(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows by their hour of arrival, oldest first, each hour's in the order of `table`."""
    hours = table.column("_t").cast(pa.int64()).to_numpy() // _HOUR_US
    for hour in np.unique(hours):
        chosen = table if (hours == hour).all() else table.filter(pa.array(hours == hour))
        yield hour_of(int(hour) * 3600), chosen
