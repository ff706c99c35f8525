"""Recorded requests on disk: names, hours, which files replace others, and which requests are drawn."""

import stat
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.hashing import hash_strings
from serin.formats.captures import (
    METADATA,
    captures_folder,
    column_names,
    hour_began,
    hour_of,
    last_number,
    parts_of_hour,
)
from serin.formats.serving.lots import is_drawn, lot
from tests.kit.recorded_parts import rows_at, write_part

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "00000001.rows"


def test_rows_are_written_to_the_hour_in_which_they_arrived(tmp_path: Path) -> None:
    parts = write_part(tmp_path, "taxis", 3, rows_at(NOON - 0.001, NOON, NOON + 1, age=[1, 2, None]))
    assert [(part.hour, part.rows, part.version) for part in parts] == [
        ("2026-03-01T11", 1, 3),
        ("2026-03-01T12", 2, 3),
    ]
    table = pq.read_table(parts[1].path)
    assert table.column_names == [*METADATA, "age"]
    assert table["age"].to_pylist() == [2, None]
    assert table.schema.field("_latency_ms").type == pa.float32()


def test_pandas_reads_a_part_with_its_types(tmp_path: Path) -> None:
    (part,) = write_part(tmp_path, "taxis", 1, rows_at(NOON, NOON + 1, name=["a", None]))
    frame = pq.read_table(part.path).to_pandas()
    assert str(frame["_t"].dtype) == "datetime64[us, UTC]"
    assert frame["name"].isna().tolist() == [False, True]


def test_only_their_owner_may_read_records(tmp_path: Path) -> None:
    (part,) = write_part(tmp_path, "taxis", 1, rows_at(NOON))
    assert stat.S_IMODE(captures_folder(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE(part.path.stat().st_mode) == 0o600


def test_numbers_rise_although_the_clock_goes_back_and_the_counters_are_lost(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON))
    (second,) = write_part(tmp_path, "taxis", 1, rows_at(NOON - 7200))
    (captures_folder(tmp_path, "taxis") / "counters.json").unlink()
    (third,) = write_part(tmp_path, "taxis", 1, rows_at(NOON - 86400))
    assert (second.last, third.last, last_number(tmp_path, "taxis")) == (2, 3, 3)


def test_a_merged_file_and_one_with_fewer_rows_replace_others(tmp_path: Path) -> None:
    folder = tmp_path / "captures" / "taxis" / "1" / "2026-03-01T12"
    folder.mkdir(parents=True)
    for name in ("1-1-5", "2-4-9", "2-2-3", "4-4-6", "2-4-8", "5-5-1"):
        first, last, rows = name.split("-")
        (folder / f"{int(first):012d}-{int(last):012d}-{rows}.parquet").touch()
    (folder / ".1234").touch()
    assert [(p.first, p.last, p.rows) for p in parts_of_hour(folder)] == [(1, 1, 5), (2, 4, 8), (5, 5, 1)]


def test_hours_are_named_in_utc() -> None:
    assert hour_of(NOON + 3599.9) == "2026-03-01T12"
    assert hour_began("2026-03-01T12") == NOON


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (["age", "_t"], ["age", "request._t"]),
        (["_answer_score"], ["request._answer_score"]),
        (["_id", "request._id"], ["request.request._id", "request._id"]),
    ],
)
def test_request_columns_never_take_the_name_of_metadata(inputs: list[str], names: list[str]) -> None:
    assert list(column_names(inputs).values()) == names


def test_lots_are_the_hash_of_the_id() -> None:
    ids = [
        "",
        "a",
        "ab",
        "abc",
        "abcd",
        "7f0e1f2c-5a53-9c1e-8c5c-5d4fbbd4a4e2",
        "ärger",
        *map(str, range(500)),
    ]
    assert [lot(each) for each in ids] == hash_strings(pa.array(ids)).tolist()
    assert lot("ä") == lot("ä".encode())


def test_a_larger_share_draws_every_id_that_a_smaller_one_draws() -> None:
    ids = [f"request-{number}" for number in range(20_000)]
    drawn = {share: {each for each in ids if is_drawn(each, share)} for share in (0.0, 0.1, 0.5, 1.0)}
    assert (len(drawn[0.0]), len(drawn[1.0])) == (0, len(ids))
    assert drawn[0.1] < drawn[0.5] < drawn[1.0]
    assert abs(len(drawn[0.1]) - 2000) < 5 * 43  # five standard deviations
