import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from serin.errors import BundleBroken
from serin.formats import shards
from serin.formats.shards import Rows, read_split, seal_part, write_rows
from serin.store import file_digests
from serin.store.file_digests import digest_of
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


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1017])
def test_a_file_has_the_digest_of_its_bytes_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(file_digests, "_BLOCK_BYTES", 100)
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb", buffering=0) as stream:
        assert digest_of(stream) == blake3(content).digest()


def test_a_part_has_another_digest_when_bytes_move_to_its_next_file(tmp_path: Path) -> None:
    """The four files one after the other would be the same bytes."""
    rows = some_rows(4)
    write_rows(tmp_path / "one", 0, rows)
    floats = rows.cat.view(np.float32)
    write_rows(tmp_path / "two", 0, Rows(
        num=np.concatenate([rows.num.reshape(-1), floats.reshape(-1)]).reshape(4, 5),
        cat=np.empty((4, 0), np.int32), target=rows.target, rows=rows.rows,
    ))  # fmt: skip
    assert seal_part(tmp_path / "one", 0, 4, "abc", "xy") != seal_part(tmp_path / "two", 0, 4, "abcxy", "")


@pytest.mark.parametrize("file", ["num.f32", "cat.i32", "target.f32", "rows.i64"])
@pytest.mark.parametrize("approximate", [(), ("b",)])
def test_every_bit_of_a_part_counts_but_those_of_approximate_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, approximate: tuple[str, ...]
) -> None:
    monkeypatch.setattr(shards, "_DIGESTED_ROWS", 4)
    write_rows(tmp_path, 0, some_rows(10))
    path = tmp_path / "part-00000" / file
    content, before = path.read_bytes(), seal_part(tmp_path, 0, 10, "abc", "xy", approximate)
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        left_out = file == "num.f32" and "abc"[at // 4 % 3] in approximate
        assert (seal_part(tmp_path, 0, 10, "abc", "xy", approximate) == before) is left_out


def test_a_part_with_too_few_numbers_is_not_sealed(tmp_path: Path) -> None:
    write_rows(tmp_path, 0, some_rows(5))
    with pytest.raises(ValueError, match=r"num\.f32 has 60 bytes, its header says 72"):
        seal_part(tmp_path, 0, 6, "abc", "xy", ("b",))
