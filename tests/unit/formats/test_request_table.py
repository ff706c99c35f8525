"""The request log as a table: the same requests as one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from serin.formats.serving.request_log import parse_requests, read_lines, read_requests
from serin.formats.serving.request_table import COLUMNS, request_table
from tests.unit.formats.test_request_log import line

GOOD = line(1.25, epoch=7, us=2500, client_id="mine", trace=None) + line(2.5, epoch=7, code=503, us=None)
UNROUTED = line(3, epoch=7, release=None) + line(4, epoch=7, release="-")


@pytest.mark.parametrize(
    "lines",
    [
        GOOD,
        GOOD + UNROUTED,
        GOOD + "not JSON\n",
        GOOD + line(5, epoch="7", code="200", us="900"),  # numbers as strings
        GOOD + line(6, epoch=7, unknown={"a": [1]}),
        line(1, epoch=7) * 3,
    ],
    ids=["plain", "unrouted", "broken", "strings", "unknown field", "without later fields"],
)
def test_a_table_has_the_requests_that_are_read_one_by_one(lines: str) -> None:
    requests, _ = parse_requests(lines.encode())
    table = request_table(lines.encode())
    assert table.schema == COLUMNS
    for name in ("t", "id", "arm", "epoch", "release", "code", "us"):
        assert table[name].to_pylist() == [getattr(request, name) for request in requests], name
    assert [value or "" for value in table["client_id"].to_pylist()] == [each.client_id for each in requests]


def test_no_lines_are_an_empty_table() -> None:
    assert request_table(b"").num_rows == 0


def test_a_rotated_log_is_read_to_its_end_although_some_lines_reached_no_release(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
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
