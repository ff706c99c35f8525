import json
from pathlib import Path

import numpy as np
import pytest

from serin.errors import BundleBroken
from serin.formats import shards
from serin.formats.shards import Rows, read_split, seal_part, write_rows
from tests.fakes.datasets import ShardWriter


def some_rows(count: int, numeric: int = 3, categorical: int = 2) -> Rows:
    return Rows(
        num=np.arange(count * numeric, dtype=np.float32).reshape(count, numeric),
        cat=np.arange(count * categorical, dtype=np.int32).reshape(count, categorical),
        target=np.arange(count, dtype=np.float32) % 2,
        rows=np.arange(count, dtype=np.int64) * 5,
    )


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", 10)


def same(left: Rows, right: Rows) -> bool:
    return all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in ("num", "cat", "target", "rows")
    )


def test_rows_come_back_as_they_were_written_over_several_parts(tmp_path: Path) -> None:
    rows = some_rows(27)
    writer = ShardWriter(tmp_path / "train", ["a", "b", "c"], ["x", "y"])
    for start in range(0, 27, 4):
        writer.write(rows[start : start + 4])
    assert len(writer.close()) == 3
    split = read_split(tmp_path, "train")
    assert [len(part) for part in split.rows] == [10, 10, 7]
    assert len(split) == 27
    assert same(split.whole(), rows)


def test_writers_may_fill_a_split_in_any_order(tmp_path: Path) -> None:
    rows = some_rows(23)
    for start, end in ((12, 23), (0, 5), (5, 12)):
        write_rows(tmp_path / "one", start, rows[start:end])
    write_rows(tmp_path / "two", 0, rows)
    digests = [
        [seal_part(tmp_path / name, part, 23, "abc", "xy") for part in range(3)] for name in ("one", "two")
    ]
    assert digests[0] == digests[1]
    assert same(read_split(tmp_path, "one").whole(), rows)


@pytest.mark.parametrize(("numeric", "categorical"), [(0, 2), (3, 0)])
def test_a_dataset_may_lack_numbers_or_categories(tmp_path: Path, numeric: int, categorical: int) -> None:
    rows = some_rows(12, numeric, categorical)
    writer = ShardWriter(tmp_path / "train", "abc"[:numeric], "xy"[:categorical])
    writer.write(rows)
    writer.close()
    assert same(read_split(tmp_path, "train").whole(), rows)


def test_a_part_that_is_cut_short_or_unfinished_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train", "abc", "xy")
    writer.write(some_rows(5))
    with pytest.raises(BundleBroken, match=r"header\.json"):
        read_split(tmp_path, "train")
    writer.close()
    file = tmp_path / "train" / "part-00000" / "cat.i32"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(BundleBroken, match=r"cat\.i32 has 36 bytes, its header says 40"):
        read_split(tmp_path, "train")


def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleBroken, match="no parts"):
        read_split(tmp_path, "train")


def test_parts_of_another_version_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train", ["a", "b", "c"], ["x", "y"])
    writer.write(some_rows(7))
    writer.close()
    header = tmp_path / "train" / "part-00000" / "header.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 0}))
    with pytest.raises(BundleBroken, match=r"not a serin\.shard document of version"):
        read_split(tmp_path, "train")
