"""`serin events`: keys and files as people write them."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from serin.errors import EventRefused, EventsUnfit, SpecError
from serin.formats.schema import DTYPE_OF_KIND, InputColumn, Kind
from serin.formats.windows import WindowPlan
from serin.pipeline.events import BATCH, file_events, read_key, training_events
from serin.store.artifacts import Bundle
from serin.store.store import Store
from serin.windows.state import MemoryState
from tests.unit.serving import bundles
from tests.unit.windows.test_attacks import answered
from tests.unit.windows.test_step import NOW, SECOND, plan, step_of


def keyed(*kinds: Kind) -> WindowPlan:
    """A plan whose key has one column of each kind, of that name."""
    made = plan()
    inputs = [InputColumn(name=kind, kind=kind, dtype=DTYPE_OF_KIND[kind]) for kind in kinds]
    return replace(made, inputs=tuple(inputs), windows=(replace(made.windows[0], by=kinds),))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "c7", "c7"),
        ("string", "12", "12"),
        ("string", "a=b", "a=b"),
        ("string", "", None),
        ("int", "12", 12),
        ("bool", "true", 1),
        ("timestamp", str(NOW), NOW),
        ("timestamp", "1970-01-01T00:00:01Z", 1_000_000),
    ],
)
def test_a_key_is_read_as_its_column_has_it(kind: Kind, text: str, value: Any) -> None:
    assert read_key(keyed(kind), [f"{kind}={text}"]) == {kind: [value]}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["int=twelve", "string=a"], "'twelve' cannot be used: it is not a int"),
        (["int=1.5", "string=a"], "is not a int"),
        ([f"int={2**63}", "string=a"], "is not a int"),
        (["int=1"], "name each column of one key once: int=VALUE string=VALUE"),
        (["int=1", "string=a", "string=b"], "name each column of one key once"),
        (["int=1", "text=a"], "name each column of one key once"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_key(keyed("int", "string"), words)


def test_a_key_is_one_of_the_plan_and_no_more_of_them() -> None:
    made = keyed("int", "string")
    plan = replace(made, windows=tuple(replace(made.windows[0], by=(name,)) for name in ("int", "string")))
    assert read_key(plan, ["string=a"]) == {"string": ["a"]}
    with pytest.raises(SpecError, match="int=VALUE, or string=VALUE"):
        read_key(plan, ["int=1", "string=a"])


def published(tmp_path: Path, source: str) -> Bundle:
    spec = {"data": {"tables": {"payments": source}, "events": {"id": "id", "arrival": "known"}}}
    return bundles.publish(Store(str(tmp_path / "store")), bias=0.0, spec=yaml.safe_dump(spec))


def write(file: Path, rows: list[tuple[str, int, int | None]]) -> None:
    """Rows of (id, seconds from now of the time, and of the arrival)."""
    ids, times, known = zip(*rows, strict=True)
    now = time.time_ns() // 1000

    def moments(seconds: tuple[int | None, ...]) -> pa.Array:
        times = [None if each is None else now + each * SECOND for each in seconds]
        return pa.array(times, pa.timestamp("us", "UTC"))

    columns = {"id": ids, "at": moments(times), "known": moments(known), "card": ["c1"] * len(ids)}
    pq.write_table(pa.table({**columns, "amount": pa.array([1.0] * len(ids), pa.float32())}), file)


def test_a_backfill_reads_all_files_in_the_order_of_arrival_and_leaves_out_what_nothing_sees(
    tmp_path: Path,
) -> None:
    (tmp_path / "table").mkdir()
    write(tmp_path / "table" / "1.parquet", [("old", -900, -900), ("c", -30, -10), ("a", -50, -50)])
    write(tmp_path / "table" / "2.parquet", [("d", -5, -5), ("b", -40, -40)])
    bundle = published(tmp_path, str(tmp_path / "table"))
    (batch,) = training_events(plan(), bundle)
    assert batch["rows"]["id"] == ["a", "b", "c", "d"]
    assert batch["arrival"] == sorted(batch["arrival"])
    with pytest.raises(EventsUnfit, match="push that"):
        next(training_events(plan(), published(tmp_path, "s3://bucket/table")))


def test_a_backfill_counts_what_the_training_table_counts(tmp_path: Path) -> None:
    """A row without an arrival arrives at its time; one that is known long before its time is not counted."""
    write(tmp_path / "table.parquet", [("a", -50, -50), ("ahead", -5, -40), ("b", -30, None)])
    (batch,) = training_events(plan(), published(tmp_path, str(tmp_path / "table.parquet")))
    (tmp_path / "plans").mkdir()
    step = step_of(tmp_path / "plans", MemoryState())
    body = json.dumps({"plan": plan().to_json(), **batch}).encode()
    assert answered(step, "/history", body).body == b'{"counted": 2}'
    assert batch["rows"]["id"] == ["a", "b"]


def test_a_file_with_one_time_in_the_future_is_refused_by_its_row_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    file, outcomes = tmp_path / "events.parquet", Counter[str]()
    rows = [("old", -900, 0), ("ahead", 3600, 0), *((f"{n}", -3, 0) for n in range(2 * BATCH))]
    write(file, rows)
    with pytest.raises(EventRefused, match="event in row 1: its 'at' is 3,600 s in the future"):
        next(file_events(plan(), file, published(tmp_path, "x.parquet"), outcomes))
    assert not outcomes


def test_events_of_a_file_that_are_too_old_are_counted_and_not_held(tmp_path: Path) -> None:
    file, outcomes = tmp_path / "events.parquet", Counter[str]()
    write(file, [("a", -3, 0), ("old", -900, 0), ("b", -9, 0), ("older", -99_000, 0)])
    (batch,) = file_events(plan(), file, published(tmp_path, "x.parquet"), outcomes)
    assert (batch["rows"]["id"], batch["arrival"], outcomes) == (["b", "a"], None, {"old": 2})
