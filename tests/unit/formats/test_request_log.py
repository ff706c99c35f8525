"""The request log, read one by one and as a table."""

import json
from pathlib import Path
from typing import Any

import pytest

from serin.formats.serving.request import Request
from serin.formats.serving.request_log import (
    START,
    Offset,
    find_offset,
    read_lines,
    read_requests,
    read_since,
)


def line(t: float, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "t": f"{t:.6f}", "model": "flights", "epoch": "3", "arm": "stable", "release": "flights-v1", "code": 200,
        "grpc": None, "us": 1500, "attempts": 1, "flags": "-",
        "id": f"request-{t}", "ms": None, "received_ms": None,
    }  # fmt: skip
    return json.dumps(fields | changes) + "\n"


def request(**changes: Any) -> Request:
    fields = Request(1.0, "flights", 3, "candidate", "flights-v2", 200, None, 900.0, 1, "-", "a")
    return fields._replace(**changes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_a_line_becomes_a_request_whatever_envoy_writes_numbers_as(log: Path) -> None:
    log.write_text(line(1.5, epoch="7", code="503", grpc="14", us="2500", attempts=None))
    batch = read_requests(log)
    assert batch.requests == [
        Request(1.5, "flights", 7, "stable", "flights-v1", 503, 14, 2500.0, 0, "-", "request-1.5")
    ]


def test_a_second_read_gives_only_what_is_new(log: Path) -> None:
    log.write_text(line(1) + line(2))
    first = read_requests(log)
    with log.open("a") as file:
        file.write(line(3))
    second = read_requests(log, Offset.from_json(json.loads(json.dumps(first.offset.to_json()))))
    assert [r.t for r in first.requests] == [1, 2]
    assert [r.t for r in second.requests] == [3]


def test_a_torn_last_line_is_left_until_it_is_whole(log: Path) -> None:
    torn = line(2)
    log.write_text(line(1) + torn[:40])
    first = read_requests(log)
    with log.open("a") as file:
        file.write(torn[40:])
    second = read_requests(log, first.offset)
    assert [r.t for r in first.requests] == [1]
    assert first.bad_lines == 0
    assert [r.t for r in second.requests] == [2]


def test_bad_lines_are_counted_and_do_not_hide_good_ones(log: Path) -> None:
    log.write_bytes(
        line(1).encode() + b'{"t": 1\n\xff\xfe\n[1]\n{}\n\n' + line(2, epoch="x").encode() + line(3).encode()
    )
    batch = read_requests(log)
    assert [r.t for r in batch.requests] == [1, 3]
    assert batch.bad_lines == 6


def test_requests_that_reached_no_release_are_neither_given_nor_bad(log: Path) -> None:
    log.write_text(
        line(1, model=None, epoch=None, release=None, arm=None, code=403) + line(2, release="-") + line(3)
    )
    batch = read_requests(log)
    assert [r.t for r in batch.requests] == [3]
    assert batch.bad_lines == 0


@pytest.mark.parametrize("grown", [1, 50], ids=["shorter than before", "longer than before"])
def test_a_truncated_log_is_read_from_its_start(log: Path, grown: int) -> None:
    log.write_text("".join(line(t) for t in range(10)))
    first = read_requests(log)
    log.write_text("".join(line(100 + t) for t in range(grown)))
    assert [r.t for r in read_requests(log, first.offset).requests] == [100 + t for t in range(grown)]


def test_a_rotated_log_is_read_to_its_end_before_the_new_one(tmp_path: Path, log: Path) -> None:
    log.write_text(line(1))
    first = read_requests(log)
    with log.open("a") as file:
        file.write(line(2))
    log.rename(tmp_path / "requests.jsonl.1")
    log.write_text(line(3))
    second = read_requests(log, first.offset)
    third = read_requests(log, second.offset)
    fourth = read_requests(log, third.offset)
    assert [[r.t for r in batch.requests] for batch in (second, third, fourth)] == [[2], [3], []]
    assert second.more


def test_a_log_that_was_moved_away_is_waited_for(tmp_path: Path, log: Path) -> None:
    log.write_text(line(1))
    first = read_requests(log)
    moved = log.rename(tmp_path / "requests.jsonl.1")
    second = read_requests(log, first.offset)
    with moved.open("a") as file:
        file.write(line(2))
    third = read_requests(log, second.offset)
    assert second.requests == []
    assert [r.t for r in third.requests] == [2]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    batch = read_requests(tmp_path / "none.jsonl")
    assert (batch.requests, batch.offset, batch.more) == ([], START, False)


def test_a_long_log_is_read_in_pieces(log: Path) -> None:
    log.write_text("".join(line(t) for t in range(20)))
    offset, arrivals, more = START, [], True
    while more:
        batch = read_requests(log, offset, max_bytes=100)
        offset, more = batch.offset, batch.more
        arrivals += [r.t for r in batch.requests]
    assert arrivals == list(range(20))


def test_a_search_by_time_skips_most_of_a_long_log_and_misses_nothing(log: Path) -> None:
    log.write_text("".join(line(t / 10 - (20 if t % 7 == 0 else 0)) for t in range(20_000)))
    assert find_offset(log, 1500).bytes > log.stat().st_size / 2
    assert len(read_since(log, 1500)) == sum(
        t / 10 - (20 if t % 7 == 0 else 0) >= 1500 for t in range(20_000)
    )


def test_a_search_by_time_covers_the_rotated_log(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl.1").write_text(line(1) + line(2))
    (tmp_path / "requests.jsonl").write_text(line(3))
    assert [r.t for r in read_since(tmp_path / "requests.jsonl", 2)] == [2, 3]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, False),
        ({"code": 400}, False),
        ({"code": 503}, True),
        ({"grpc": 0}, False),
        ({"grpc": 3}, False),
        ({"grpc": 14}, True),
        ({"attempts": 2}, True),
        ({"code": 0, "flags": "DC", "us": None}, False),
        ({"code": 0, "flags": "UT,DC", "us": None}, False),
        ({"code": 0, "flags": "UF", "us": None}, True),
    ],
)
def test_a_request_failed_when_its_release_is_to_blame(changes: dict[str, Any], failed: bool) -> None:
    assert request(**changes).failed is failed


@pytest.mark.parametrize(
    ("changes", "waited_us"),
    [
        ({}, None),
        ({"flags": "DC", "ms": 9.0}, None),
        ({"flags": "DC", "us": None}, None),
        ({"flags": "DR", "us": None, "ms": 9.0}, 0.0),
        ({"flags": "UT,DC", "us": None, "ms": 9.0, "received_ms": 2.0}, 7000.0),
        ({"flags": "UF", "us": None, "ms": 9.0, "received_ms": 2.0}, None),
    ],
    ids=[
        "answered",
        "answered, then gone",
        "it was never received",
        "never sent it whole",
        "waited",
        "not the client",
    ],
)
def test_a_client_that_went_away_had_waited_since_its_request_was_here(
    changes: dict[str, Any], waited_us: float | None
) -> None:
    assert request(**changes).waited_us == waited_us


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"code": 400}, True),
        ({"code": 429}, True),
        ({"code": 404, "attempts": 2}, False),
        ({"code": 503}, False),
        ({"grpc": 0}, False),
        ({"grpc": 1}, False),
        ({"grpc": 3}, True),
        ({"grpc": 5}, True),
        ({"grpc": 14}, False),
    ],
)
def test_a_request_was_refused_when_its_release_blames_the_client(
    changes: dict[str, Any], refused: bool
) -> None:
    assert request(**changes).refused is refused


def test_a_rotated_log_is_read_to_its_end_although_some_lines_reached_no_release(
    tmp_path: Path, log: Path
) -> None:
    log.write_text(line(1))
    first = read_requests(log)
    with log.open("a") as file:
        file.write(line(2, release="-") + line(3))
    log.rename(tmp_path / "requests.jsonl.1")
    log.write_text(line(4))
    found, offset, more = [], first.offset, True
    while more:
        batch = read_requests(log, offset, max_bytes=100)  # one line at a time
        found += [request.t for request in batch.requests]
        offset, more = batch.offset, batch.more or batch.offset != read_lines(log, batch.offset).offset
    assert found == [3, 4]
