"""The recorder: every request that the gateway left is recorded once, whatever happens."""

import gzip
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serin.formats.captures import captures_folder
from serin.formats.serving.ring import ring_files
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release
from tests.kit.waiting import Clock
from tests.unit.monitoring.capture.worker import NOON, Worker, recorder, request


def ages(home: Path) -> list[int]:
    return sorted(captured(home, "taxis", columns=["age"])["age"].to_pylist())


def test_rows_have_their_columns_answers_and_what_the_gateway_knows(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    unknown = replace(request(8, NOON + 1), arm="", epoch=-1, us=float("nan"), client_id="")
    worker.leave([request(7, NOON, rows=2, arm="candidate"), unknown])
    assert recorder(tmp_path).record(NOON + 9).requests == 2
    rows = captured(tmp_path, "taxis").drop_columns(["_t"]).to_pylist()
    known = {"_arm": "candidate", "_epoch": 4, "_latency_ms": 2.5, "_client_id": "mine-7"}
    assert rows[1] == {
        "_id": "id-7", "_row": 1, "_release": "taxis-v1", "_source": "live", "_status": 200, **known,
        "name": "n7", "age": 7001, "fare": 1.75, "_answer_score": 2.75,
    }  # fmt: skip
    assert [row["_row"] for row in rows] == [0, 1, 0]
    assert rows[2]["_id"] == "id-8"
    assert [rows[2][name] for name in known] == [None] * 4
    assert worker.waits == 0


def test_requests_of_two_hours_and_two_releases_are_kept_apart(tmp_path: Path) -> None:
    Worker(tmp_path).leave([request(1, NOON - 1), request(2, NOON)])
    Worker(tmp_path, "taxis-v2-baseline").leave([request(3, NOON)])
    assert recorder(tmp_path).record(NOON).requests == 3
    folders = sorted(
        str(path.parent.relative_to(captures_folder(tmp_path, "taxis")))
        for path in captures_folder(tmp_path).rglob("*.parquet")
    )
    assert folders == ["1/2026-03-01T11", "1/2026-03-01T12", "2/2026-03-01T12"]
    assert set(captured(tmp_path, "taxis")["_release"].to_pylist()) == {"taxis-v1", "taxis-v2-baseline"}


def test_masked_columns_are_null_and_dropped_ones_are_missing(tmp_path: Path) -> None:
    Worker(tmp_path).leave([request(1, NOON)])
    hidden = CaptureSpec(share=1, mask=("name", "age"), drop=("fare",))
    recorder(tmp_path, lambda _: hidden).record(NOON)
    (row,) = captured(tmp_path, "taxis").to_pylist()
    assert (row["name"], row["age"], "fare" in row) == (None, None, False)
    assert not any(b"n1" in path.read_bytes() for path in tmp_path.rglob("*.parquet"))


def test_what_had_no_room_and_what_cannot_be_decoded_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path, share=0.5)
    worker.leave([request(1, NOON)], dropped=4)
    broken = [
        replace(request(2, NOON), request=b"{"),
        replace(request(4, NOON), answer=b"[]"),
        replace(request(6, NOON), request=request(6, NOON).request.replace(b"INT64", b"INT32")),
        replace(request(8, NOON), encoding=3),
    ]
    worker.leave([*broken, request(3, NOON)])
    assert recorder(tmp_path).record(NOON).requests == 2
    view = read_captures(tmp_path, "taxis")
    assert (view.requests, view.rows, view.dropped, view.damaged) == (2, 2, 8, 4)
    assert view.releases["taxis-v1"].share == 0.5
    assert worker.ring.drawn == view.requests + view.dropped
    assert "requests of taxis-v1 cannot be recorded: the answer cannot be read" in caplog.text


@pytest.mark.parametrize(("encoding", "pack"), [(1, gzip.compress), (2, zlib.compress)])
def test_answers_that_were_sent_compressed_are_recorded_as_their_content(
    tmp_path: Path, encoding: int, pack: Callable[[bytes], bytes]
) -> None:
    plain = request(2, NOON, rows=3)
    bomb = pack(bytes(70 << 20))
    Worker(tmp_path).leave(
        [
            replace(plain, answer=pack(plain.answer), encoding=encoding),
            replace(plain, answer=bomb, encoding=encoding),
        ]
    )
    assert recorder(tmp_path).record(NOON).requests == 1
    assert captured(tmp_path, "taxis")["_answer_score"].to_pylist() == [1.5] * 3
    assert read_captures(tmp_path, "taxis").dropped == 1


def test_what_a_killed_gateway_had_counted_and_not_written_is_counted_as_lost(tmp_path: Path) -> None:
    worker, other = Worker(tmp_path), Worker(tmp_path, "buses-v1")
    worker.leave([request(1, NOON)])
    worker.ring.drawn += 5
    worker.ring.drop("taxis-v1", 3)  # no entry says of which release, and two are nowhere
    keeper = recorder(tmp_path)
    keeper.record(NOON)
    assert read_captures(tmp_path, "taxis").dropped == 0, "the gateway lives and may still say it"
    worker.ring.end()
    keeper.record(NOON)
    view = read_captures(tmp_path, "taxis")
    assert (view.requests, view.dropped) == (1, 5)
    assert ring_files(tmp_path) == [other.ring.path]
    recorder(tmp_path).record(NOON)
    assert read_captures(tmp_path, "taxis").dropped == 5


def test_a_ring_that_is_damaged_is_left_behind_and_its_requests_are_lost(tmp_path: Path) -> None:
    worker, keeper = Worker(tmp_path), recorder(tmp_path)
    worker.leave([request(1, NOON)])
    second = worker.ring.head
    worker.leave([request(2, NOON), request(3, NOON)])
    worker.ring.damage(second, bytes(8))
    assert keeper.record(NOON).requests == 1
    worker.leave([request(4, NOON)])
    assert keeper.record(NOON).requests == 1
    worker.ring.end()
    keeper.record(NOON)
    view = read_captures(tmp_path, "taxis")
    assert (ages(tmp_path), view.dropped) == ([1000, 4000], 2)


def test_a_model_that_cannot_be_written_does_not_cost_the_others_their_room(tmp_path: Path) -> None:
    clock, worker = Clock(), Worker(tmp_path)
    keeper = recorder(tmp_path, clock=clock)
    captures_folder(tmp_path).mkdir()
    captures_folder(tmp_path, "taxis").write_text("in the way")
    long = request(2, NOON, rows=3000)
    for _ in range(20):
        assert worker.ring.write(replace(long, release="taxis-v1"))
        assert worker.ring.write(replace(request(4, NOON), release="buses-v1"))
        keeper.record(NOON)
    assert len(captured(tmp_path, "buses")) == 20
    captures_folder(tmp_path, "taxis").unlink()
    clock.t = 60.0
    worker.leave([request(6, NOON)])
    keeper.record(NOON)
    view = read_captures(tmp_path, "taxis")
    assert (view.requests + view.dropped, worker.waits) == (21, 0)
    assert view.requests > 1
    assert view.dropped > 0


def test_a_version_that_no_longer_exists_is_counted_as_dropped(tmp_path: Path) -> None:
    def settings(release: Release) -> CaptureSpec | None:
        return None if release.version == 1 else CaptureSpec(share=1)

    Worker(tmp_path).leave([request(1, NOON)])
    Worker(tmp_path, "taxis-v2").leave([request(2, NOON)])
    recorder(tmp_path, settings).record(NOON)
    view = read_captures(tmp_path, "taxis")
    assert (view.requests, view.dropped) == (1, 1)
    assert ages(tmp_path) == [2000]


def test_a_clock_that_jumps_by_hours_neither_loses_nor_doubles(tmp_path: Path) -> None:
    worker, keeper = Worker(tmp_path), recorder(tmp_path)
    jumps = (0, 5 * 3600, 5 * 3600, -7 * 3600, -7 * 3600, 0, 40 * 86400)
    for number, jump in enumerate(jumps):
        worker.leave([request(number, NOON + jump + number)])
        if number % 2:
            keeper.record(NOON + jump)
    for at in (NOON + 40 * 86400, NOON):
        recorder(tmp_path).record(at)
    assert ages(tmp_path) == [1000 * number for number in range(len(jumps))]


def test_a_time_that_is_not_a_number_is_replaced_by_the_recorders(tmp_path: Path) -> None:
    Worker(tmp_path).leave([request(1, float("nan")), request(2, -5.0), request(3, 1e300)])
    assert recorder(tmp_path).record(NOON).requests == 3
    hours = sorted(path.parent.name for path in tmp_path.rglob("*.parquet"))
    assert hours == ["1970-01-01T00", "2026-03-01T12", "9999-01-01T00"]


def test_a_folder_that_cannot_be_written_keeps_the_ring_and_is_tried_again(tmp_path: Path) -> None:
    clock = Clock()
    keeper = recorder(tmp_path, clock=clock)
    Worker(tmp_path).leave([request(1, NOON)])
    Worker(tmp_path, "buses-v1").leave([request(2, NOON)])
    captures_folder(tmp_path).mkdir()
    captures_folder(tmp_path, "taxis").write_text("in the way")
    first = keeper.record(NOON)
    assert (first.requests, list(first.failed)) == (1, ["taxis"])
    assert keeper.record(NOON).failed
    captures_folder(tmp_path, "taxis").unlink()
    clock.t = 60.0
    assert keeper.record(NOON).requests == 1
    assert keeper.record(NOON).failed == {}
    assert ages(tmp_path) == [1000]


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Writing fails in the middle of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_in_the_middle_of_a_part_loses_nothing(tmp_path: Path) -> None:
    clock = Clock()
    keeper = recorder(tmp_path, clock=clock)
    worker = Worker(tmp_path)
    worker.leave([request(number, NOON) for number in range(300)])
    with no_file_larger_than(3000):
        outcome = keeper.record(NOON)
    assert (outcome.requests, list(outcome.failed)) == (0, ["taxis"])
    assert worker.waits > 0
    assert not [path for path in captures_folder(tmp_path).rglob(".*") if path.is_file()]
    clock.t = 60.0
    assert keeper.record(NOON).requests == 300
    assert ages(tmp_path) == [1000 * number for number in range(300)]


def test_a_long_backlog_is_recorded_in_batches_that_are_bounded(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.leave([request(number, NOON + number) for number in range(400)])
    assert recorder(tmp_path, batch_bytes=20_000).record(NOON).requests == 400
    assert ages(tmp_path) == [1000 * number for number in range(400)]
    assert len(list(tmp_path.rglob("*.parquet"))) > 5


@pytest.mark.parametrize("content", [b"", b'{"format": "serin.captures", "ver', b'{"other": 1}'])
def test_damaged_counters_are_named_and_left_and_nothing_is_lost(tmp_path: Path, content: bytes) -> None:
    worker, clock = Worker(tmp_path), Clock()
    worker.leave([request(1, NOON)])
    records = recorder(tmp_path, clock=clock)
    records.record(NOON)
    file = captures_folder(tmp_path, "taxis") / "counters.json"
    file.write_bytes(content)
    worker.leave([request(2, NOON)])
    Worker(tmp_path, "flights-v1").leave([request(3, NOON)])
    outcome = records.record(NOON)
    assert (outcome.requests, file.read_bytes()) == (1, content), "the other model is recorded"
    assert "counters.json" in str(outcome.failed["taxis"])
    assert "move it away" in str(outcome.failed["taxis"])
    file.rename(file.with_name("aside.json"))
    clock.t += 60
    records.record(NOON)
    assert ages(tmp_path) == [1000, 2000]
    view = read_captures(tmp_path, "taxis")
    assert view
    assert view.dropped == 0, "that counts are gone does not mean that requests are"
