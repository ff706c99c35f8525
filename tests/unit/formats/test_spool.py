"""The spool: what is written is read back, a torn end is recognised, and lots depend on the id alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.hashing import hash_strings
from serin.errors import SpoolBroken
from serin.formats.serving.spool import Recorded, encode_block, encode_header, is_drawn, lot, read_spool

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


def test_what_was_written_is_read_back_by_column(tmp_path: Path) -> None:
    path = tmp_path / "00000001.rows"
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


def test_counters_alone_are_a_block(tmp_path: Path) -> None:
    path = tmp_path / "00000001.rows"
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


def test_a_damaged_block_is_never_read_as_other_rows(tmp_path: Path) -> None:
    first, _ = _blocks()
    path = tmp_path / "00000001.rows"
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
def test_a_file_without_a_sound_first_line_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "00000001.rows"
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
