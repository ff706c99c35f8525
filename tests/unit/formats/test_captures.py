"""Recorded requests on disk: names, hours, which files replace others, and the spool before them."""

import stat
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.hashing import hash_strings
from serin.errors import SpoolBroken
from serin.formats.captures import (
    METADATA,
    captures_folder,
    column_names,
    hour_began,
    hour_of,
    last_number,
    parts_of_hour,
    write_part,
)
from serin.formats.serving.spool import read_spool
from serin.formats.serving.spool_blocks import Recorded, encode_block, encode_header, is_drawn, lot

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def rows_at(*times: float, **columns: list[object]) -> pa.Table:
    t = pa.array([round(t * 1e6) for t in times], pa.int64()).cast(METADATA["_t"])
    ids = [f"id-{t:.3f}" for t in times]
    return pa.table({"_id": ids, "_row": pa.array([0] * len(times), pa.int32()), "_t": t, **columns})


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


HEADER = encode_header(
    model="flights",
    release="flights-v3",
    share=0.25,
    inputs=[("carrier", "string", (1,)), ("distance", "float", (1,)), ("image", "int", (2, 2))],
    outputs=[("score", "FP32", (1,)), ("words", "BYTES", (2,))],
)


def _request(number: int, rows: int) -> Recorded:
    texts = np.array([f"é{number}.{row}".encode() for row in range(rows)], object).reshape(rows, 1)
    words = np.array([[b"", b"x" * row] for row in range(rows)], object).reshape(rows, 2)
    numbers = np.arange(rows, dtype=np.float32).reshape(rows, 1) + number
    image = np.arange(4 * rows).reshape(rows, 2, 2) - number
    return Recorded(
        100.5 + number, f"id-{number}".encode(), b"" if number else b"mine", rows,
        [texts, numbers, image, numbers / 2, words],
    )  # fmt: skip


def _blocks() -> list[bytes]:
    few, many = [_request(0, 1), _request(1, 3)], [_request(2, 0), _request(3, 50)]
    return [encode_block(few, sent=2, dropped=0), encode_block(many, sent=9, dropped=5)]


def test_what_was_written_is_read_back_by_column(path: Path) -> None:
    path.write_bytes(HEADER + b"".join(_blocks()))
    found = read_spool(path)
    assert (found.header.model, found.header.release, found.header.share) == ("flights", "flights-v3", 0.25)
    assert [(tensor.name, tensor.kind, tensor.dims) for tensor in found.header.inputs][2] == (
        "image", "int", (2, 2),
    )  # fmt: skip
    first, second = found.blocks
    assert (first.requests, first.rows, second.sent, second.dropped, found.torn_bytes) == (2, 4, 9, 5, 0)
    assert (first.t.tolist(), first.request_rows.tolist()) == ([100.5, 101.5], [1, 3])
    assert (first.ids.to_list(), first.client_ids.to_list()) == (["id-0", "id-1"], ["mine", ""])
    carrier, distance, image = first.inputs
    assert carrier.to_list() == ["é0.0", "é1.0", "é1.1", "é1.2"]  # type: ignore[union-attr]
    assert distance.tolist() == [[0.0], [1.0], [2.0], [3.0]]  # type: ignore[union-attr]
    assert image.shape == (4, 2, 2)  # type: ignore[union-attr]
    assert second.outputs[1].to_arrow()[-1].as_py() == b"x" * 49  # type: ignore[union-attr]


def test_counters_alone_are_a_block(path: Path) -> None:
    path.write_bytes(HEADER + encode_block([], sent=7, dropped=7) + _blocks()[0])
    empty, full = read_spool(path).blocks
    assert (empty.requests, empty.dropped, len(empty.inputs[0]), full.requests) == (0, 7, 0, 2)


def test_a_file_that_ends_anywhere_gives_its_whole_blocks(tmp_path: Path) -> None:
    first, second = _blocks()
    whole, path = HEADER + first + second, tmp_path / "00000001.open"
    near = range(len(HEADER + first) - 20, len(HEADER + first) + 20)
    for end in {*range(len(HEADER), len(whole), 7), *near}:
        path.write_bytes(whole[:end])
        found = read_spool(path)
        blocks = int(end >= len(HEADER + first))
        assert len(found.blocks) == blocks
        assert found.torn_bytes == end - len(HEADER) - blocks * len(first)


def test_a_damaged_block_is_never_read_as_other_rows(path: Path) -> None:
    first, _ = _blocks()
    for old, new in (
        (b'"rows":4', b'"rows":5'),
        (b'"sizes":[16', b'"sizes":[17'),
        (b'"requests":2', b'"requests":1'),
    ):
        assert old in first
        path.write_bytes(HEADER + first.replace(old, new))
        assert read_spool(path).blocks == ()


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"no json\n", HEADER[:-1], HEADER.replace(b'"float"', b'"half"')]
)
def test_a_file_without_a_sound_first_line_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SpoolBroken, match=r"00000001\.rows"):
        read_spool(path)


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
