"""Reading recorded requests, by period and by what is new."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from serin.errors import NameInvalid
from serin.formats.captures import METADATA, write_part
from serin.monitoring.capture.read import alike, captured, parts, read_part

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def rows_at(*times: float, **columns: list[object]) -> pa.Table:
    t = pa.array([round(t * 1e6) for t in times], pa.int64()).cast(METADATA["_t"])
    ids = [f"id-{t:.3f}" for t in times]
    return pa.table({"_id": ids, "_row": pa.array([0] * len(times), pa.int32()), "_t": t, **columns})


def test_a_period_includes_its_beginning_and_excludes_its_end(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON - 1, NOON, NOON + 1, NOON + 3601, age=[1, 2, 3, 4]))
    assert captured(tmp_path, "taxis", since=NOON, until=NOON + 1, columns=["age"])["age"].to_pylist() == [2]
    assert captured(tmp_path, "taxis", since=NOON + 1)["age"].to_pylist() == [3, 4]
    assert captured(tmp_path, "taxis", until=NOON)["age"].to_pylist() == [1]


def test_versions_with_other_columns_and_types_are_read_together(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON, age=[1], mode=["x"]))
    write_part(tmp_path, "taxis", 2, rows_at(NOON, age=[1.5], mode=[7]))
    table = captured(tmp_path, "taxis")
    assert table["age"].to_pylist() == [1.0, 1.5]
    assert table["mode"].to_pylist() == ["x", "7"]
    only = captured(tmp_path, "taxis", versions=[2], columns=["mode", "nothing"])
    assert only.column_names == ["mode"]
    assert only["mode"].to_pylist() == [7]


def test_a_model_without_records_gives_an_empty_table_with_the_metadata(tmp_path: Path) -> None:
    table = captured(tmp_path, "taxis")
    assert (table.num_rows, table.column_names) == (0, list(METADATA))
    assert captured(tmp_path, "taxis", columns=["_id"]).column_names == ["_id"]
    assert parts(tmp_path, "taxis") == []
    with pytest.raises(NameInvalid):
        captured(tmp_path, "../taxis")


def test_a_follower_gets_each_part_once_in_the_order_of_writing(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON, age=[1]))
    write_part(tmp_path, "taxis", 2, rows_at(NOON - 7200, age=[2]))
    first, second = parts(tmp_path, "taxis")
    assert (first.version, second.version) == (1, 2)
    assert parts(tmp_path, "taxis", after=second.sequence) == []
    write_part(tmp_path, "taxis", 1, rows_at(NOON - 3600, NOON, age=[3, 4]))
    new = parts(tmp_path, "taxis", after=second.sequence)
    tables = [read_part(part, ["age"]) for part in new]
    assert [table["age"].to_pylist() for table in tables if table is not None] == [[3], [4]]


def test_a_part_that_is_gone_is_none(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON))
    (part,) = parts(tmp_path, "taxis")
    part.path.unlink()
    assert read_part(part) is None


def test_tables_with_lists_and_nulls_are_read_together() -> None:
    one = pa.table({"x": pa.array([[1.0]], pa.list_(pa.float32()))})
    other = pa.table({"y": pa.array([1])})
    assert alike([one, other]).to_pylist() == [{"x": [1.0], "y": None}, {"x": None, "y": 1}]
