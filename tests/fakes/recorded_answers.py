"""A model whose answers are recorded: exported by the real parts, its records written as those of requests are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serin.formats.bundle import with_answers
from serin.formats.captures import METADATA
from serin.formats.schema import read_schema
from serin.monitoring.capture.bulk import BulkRecords
from serin.monitoring.capture.read import captured
from serin.pipeline.lookups import _find_or_publish, _refreshable
from serin.scoring.predict import Scorer
from serin.spec.stored import stored_capture
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.kit.recorded_parts import write_part
from tests.unit.export.small_dataset import flights, make_trained, planes, spec_for

MODEL = "flights"
NOON = 1772366400.0  # 2026-03-01T12:00 UTC


@dataclass(frozen=True, slots=True)
class Model:
    """`table`: of the lookup."""

    store: Store
    base: Bundle
    table: Path

    def refresh(self, **seats: int) -> Bundle:
        """An edition with other seats of some planes."""
        rows = [{**row, "seats": seats.get(row["tailnum"], row["seats"])} for row in planes().to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, schema=planes().schema), self.table)
        spec, known = _refreshable(self.base)
        return _find_or_publish(self.store, self.base, spec, known, self.base.release, None)


def make_model(folder: Path, url: str, **sections: Any) -> Model:
    table = folder / "planes.parquet"
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(folder / "flights.parquet"), "planes": str(table)}
    sections = {"monitoring": {"capture": {"share": 1.0}}, **sections}
    trained = make_trained(folder / "trained", "binary", data=data, **sections)
    base = trained.export(Store(url, cache=folder / "cache"))
    pq.write_table(planes(), table)
    return Model(store=Store(url, cache=folder / "cache"), base=base, table=table)


def answered(
    bundle: Bundle, scratch: Path, rows: pa.Table, ids: Sequence[str], t: float = NOON, **changed: Any
) -> pa.Table:
    """What is recorded of requests for `rows`, which the bundle answers: the rows with equal ids are one request.
    `changed`: other values of some columns."""
    schema = read_schema(Path(bundle.path))
    answer = Scorer(bundle.path).answers(rows)
    records = BulkRecords(scratch, bundle.release, schema, stored_capture(Path(bundle.path)))
    records.add(with_answers(rows, answer, schema), 0)
    records.finish()
    table = captured(scratch, bundle.model)
    numbers = [list(ids[:place]).count(each) for place, each in enumerate(ids)]
    times = pa.array([round(t * 1e6)] * len(ids), pa.int64()).cast(METADATA["_t"])
    columns = {
        "_id": pa.array(ids, pa.string()), "_row": pa.array(numbers, pa.int32()), "_t": times,
        "_status": pa.array([200] * len(ids), pa.int32()), "_source": pa.array(["live"] * len(ids), pa.string()),
        **{name: pa.array(values, table.schema.field(name).type) for name, values in changed.items()},
    }  # fmt: skip
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table


def record(
    home: Path, bundle: Bundle, scratch: Path, rows: pa.Table, ids: Sequence[str], **more: Any
) -> None:
    write_part(home, bundle.model, bundle.version, answered(bundle, scratch, rows, ids, **more))


def some_flights(first: int, count: int) -> pa.Table:
    return flights().slice(first, count)
