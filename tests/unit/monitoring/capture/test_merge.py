"""Reading, merging, deleting and expiring records."""

import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import NameInvalid
from serin.expressions import ExpressionError
from serin.formats.captures import METADATA, captures_folder, part_map, parts_of_hour
from serin.monitoring.capture import read
from serin.monitoring.capture.forget import forget
from serin.monitoring.capture.merge import merge_parts, tidy
from serin.monitoring.capture.read import Source, alike, batches, captured, parts, read_part
from serin.monitoring.capture.retention import HomeHours, delete_versions, expire
from serin.spec.monitoring import CaptureSpec
from tests.kit.recorded_parts import rows_at, write_part
from tests.unit.monitoring.capture.worker import NOON

DAY_S = 86400.0


def read_only(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def rows(first: int, count: int, t: float = NOON, **columns: list[object]) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "_id": [f"id-{number}" for number in numbers],
            "_row": pa.array([0] * count, pa.int32()),
            "_t": pa.array([round(t * 1e6)] * count, pa.int64()).cast(METADATA["_t"]),
            "age": pa.array(numbers, pa.int64()),
            **columns,
        }
    )


def ages(table: pa.Table | None) -> list[int]:
    assert table is not None
    return [int(age) for age in table["age"].to_pylist()]


def followed(home: Path, after: str | None) -> list[int]:
    return [age for part in parts(home, "taxis", after=after) for age in ages(read_part(part, ["age"]))]


def test_an_hour_that_is_over_becomes_one_file_with_all_rows_in_order(tmp_path: Path) -> None:
    for number in range(5):
        write_part(tmp_path, "taxis", 1, rows(10 * number, 3))
    assert merge_parts(tmp_path, "taxis", NOON + 60) == 0  # not over, and not many
    assert merge_parts(tmp_path, "taxis", NOON + 2 * 3600) == 5
    (part,) = parts_of_hour(captures_folder(tmp_path, "taxis") / "1" / "2026-03-01T12")
    assert (part.first, part.last, part.rows) == (1, 5, 15)
    assert part_map(part.path) == [(number, 3) for number in range(1, 6)]
    assert ages(captured(tmp_path, "taxis")) == [10 * n + k for n in range(5) for k in range(3)]


def test_many_parts_are_merged_before_the_hour_is_over(tmp_path: Path) -> None:
    for number in range(4):
        write_part(tmp_path, "taxis", 1, rows(number, 1))
    assert merge_parts(tmp_path, "taxis", NOON + 60, most_small=4) == 4


def test_followers_that_stop_between_two_batches_see_all_rows_of_hours_that_were_written_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_BATCH_ROWS", 1)
    for number in range(4):
        write_part(tmp_path, "taxis", 1, rows(10 * number, 2, NOON))
        write_part(tmp_path, "taxis", 2, rows(10 * number + 5, 2, NOON))
    merge_parts(tmp_path, "taxis", NOON + DAY_S)
    write_part(tmp_path, "taxis", 1, rows(40, 2, NOON))
    seen, last = list[int](), None
    while batch := next(batches(Source(tmp_path), "taxis", after=last), None):
        last = batch[-1].sequence
        seen += [age for part in batch for age in ages(read_part(part, ["age"]))]
    assert sorted(seen) == sorted(ages(captured(tmp_path, "taxis")))
    assert len(seen) == len(set(seen)) == 18


def test_parts_up_to_a_number_leave_out_later_rows_of_a_merged_file(tmp_path: Path) -> None:
    for number in range(4):
        write_part(tmp_path, "taxis", 1, rows(10 * number, 2))
    merge_parts(tmp_path, "taxis", NOON + DAY_S)
    (part,) = parts(tmp_path, "taxis", after="1", until=3)
    assert (part.first, part.last, ages(read_part(part, ["age"]))) == (2, 3, [10, 11, 20, 21])


def test_followers_of_any_part_get_the_rest_of_a_merged_file(tmp_path: Path) -> None:
    sequences = [write_part(tmp_path, "taxis", 1, rows(10 * number, 2))[0].sequence for number in range(4)]
    merge_parts(tmp_path, "taxis", NOON + DAY_S)
    forget(HomeHours(tmp_path, "taxis"), "age == 20 or age == 1")
    assert followed(tmp_path, None) == [0, 10, 11, 21, 30, 31]
    assert followed(tmp_path, sequences[0]) == [10, 11, 21, 30, 31]
    assert followed(tmp_path, sequences[1]) == [21, 30, 31]
    assert followed(tmp_path, sequences[2]) == [30, 31]
    assert followed(tmp_path, sequences[3]) == []


def test_parts_with_other_columns_are_merged(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows(1, 1, extra=["x"]))
    write_part(tmp_path, "taxis", 1, rows(2, 1))
    merge_parts(tmp_path, "taxis", NOON + DAY_S)
    assert captured(tmp_path, "taxis")["extra"].to_pylist() == ["x", None]


def test_a_part_is_not_seen_before_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of two hours that is not finished: its second file has its name already, the first has not. A reader
    finishes it, unless it can only read."""
    first, second = write_part(tmp_path, "taxis", 1, pa.concat_tables([rows(1, 1), rows(2, 1, NOON + 3600)]))
    folder = captures_folder(tmp_path, "taxis")
    text = (folder / "counters.json").read_text()
    scratch = folder / text.split('"publish": [["')[1].split('"')[0]
    first.path.rename(scratch)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", read_only)
        assert parts(tmp_path, "taxis") == []
        with pytest.raises(OSError, match="Read-only"):
            tidy(tmp_path, "taxis")
    assert scratch.exists(), "it holds rows that are counted"
    assert [part.sequence for part in parts(tmp_path, "taxis")] == [first.sequence, second.sequence]


def test_forgotten_rows_are_gone_from_the_bytes_of_all_files(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows(1, 3, name=["Ada", "Bob", None]))
    write_part(tmp_path, "taxis", 2, rows(1, 1, NOON + DAY_S, name=["Ada"]))
    write_part(tmp_path, "taxis", 3, rows(7, 1))  # has no name: not Ada's
    told = []
    deletion = forget(
        HomeHours(tmp_path, "taxis"), "name == 'Ada'", also=[lambda *rows: told.append(rows) or 5]
    )
    assert (deletion.rows, deletion.files, deletion.labels, deletion.unread) == (2, 2, 10, ("name",))
    assert [(version, ages(table)) for version, table in told] == [(1, [1]), (2, [1])]
    assert ages(captured(tmp_path, "taxis")) == [2, 3, 7]
    assert not any(b"Ada" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_forget_counts_without_deleting_when_asked(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows(1, 3))
    assert forget(HomeHours(tmp_path, "taxis"), "age > 1 and not is_null(_arm)", remove=False).rows == 0
    assert forget(HomeHours(tmp_path, "taxis"), "age = 1 or age = 3", remove=False).rows == 2
    assert forget(HomeHours(tmp_path, "taxis"), "true", remove=False).rows == 3
    assert len(ages(captured(tmp_path, "taxis"))) == 3


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("agee == 1", "no column 'agee'; they have _answer"),
        ("age + 1", "is not a condition"),
        ("age = = 1", "="),
        ("_answer_p == 1", "cannot be used"),
    ],
)
def test_an_expression_that_does_not_fit_deletes_nothing(tmp_path: Path, where: str, message: str) -> None:
    write_part(tmp_path, "taxis", 1, rows(1, 1, _answer_p=[[0.5, 0.5]]))
    with pytest.raises(ExpressionError, match=message):
        forget(HomeHours(tmp_path, "taxis"), where)
    assert ages(captured(tmp_path, "taxis")) == [1]


def test_records_older_than_their_days_are_deleted(tmp_path: Path) -> None:
    for day in range(4):
        write_part(tmp_path, "taxis", 1 + day % 2, rows(day, 1, NOON + day * DAY_S))
    assert (
        expire(HomeHours(tmp_path, "taxis"), CaptureSpec(keep=2 * 86_400), None) == 0
    )  # the clock is not trusted
    assert expire(HomeHours(tmp_path, "taxis"), CaptureSpec(keep=2 * 86_400), NOON + 3 * DAY_S + 3600) > 0
    assert sorted(ages(captured(tmp_path, "taxis"))) == [2, 3]


def test_the_oldest_hours_are_deleted_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    sizes = [
        write_part(tmp_path, "taxis", 1, rows(hour, 1, NOON + hour * 3600))[0].path.stat().st_size
        for hour in range(4)
    ]
    expire(HomeHours(tmp_path, "taxis"), CaptureSpec(max_size=sum(sizes[2:])), NOON)
    assert ages(captured(tmp_path, "taxis")) == [2, 3]


def test_the_records_of_a_version_can_be_deleted(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows(1, 1))
    write_part(tmp_path, "taxis", 2, rows(2, 1))
    assert delete_versions(HomeHours(tmp_path, "taxis"), [1]) > 0
    assert delete_versions(HomeHours(tmp_path, "taxis"), [1]) == 0
    assert ages(captured(tmp_path, "taxis")) == [2]


def test_a_merged_file_is_written_in_large_groups(tmp_path: Path) -> None:
    for number in range(6):
        write_part(tmp_path, "taxis", 1, rows(number, 1))
    merge_parts(tmp_path, "taxis", NOON + DAY_S)
    (part,) = parts(tmp_path, "taxis")
    assert pq.read_metadata(part.path).num_row_groups == 1


def test_a_period_includes_its_beginning_and_excludes_its_end(tmp_path: Path) -> None:
    write_part(tmp_path, "taxis", 1, rows_at(NOON - 1, NOON, NOON + 1, NOON + 3601, age=[1, 2, 3, 4]))
    assert ages(captured(tmp_path, "taxis", since=NOON, until=NOON + 1, columns=["age"])) == [2]
    assert ages(captured(tmp_path, "taxis", since=NOON + 1)) == [3, 4]
    assert ages(captured(tmp_path, "taxis", until=NOON)) == [1]


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
