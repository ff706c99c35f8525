"""Tables that the served model looks values up in: published with the dataset, as they were joined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.etl.relational.relation import LoadedJoin
from serin.formats.dataset import LookupDescription
from serin.formats.schema import DTYPE_OF_KIND, Kind


def write_lookup(
    join: LoadedJoin, kinds: Mapping[str, Kind], folder: Path
) -> tuple[LookupDescription, pa.Table]:
    """Puts the table into the dataset's folder. Rows without a key are left out: nobody can ask for them."""
    spec = join.layout.spec
    key = spec.on[0]
    assert join.index is not None, "a lookup is no as-of join"
    columns = {key: join.index.keys[0]} | dict(join.columns)
    present = np.flatnonzero(~columns[key].null)
    table = pa.table({name: _plain(column[present].to_arrow()) for name, column in columns.items()})
    file = f"lookups/{spec.table}.parquet"
    (folder / "lookups").mkdir(exist_ok=True)
    pq.write_table(table, folder / file)
    dtypes = {name: DTYPE_OF_KIND[kinds[name]] for name in join.columns}
    return LookupDescription(name=spec.table, key=key, columns=dtypes, file=file), table


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
