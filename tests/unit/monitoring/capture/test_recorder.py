"""The recorder: every request that a backend left is recorded once, whatever happens."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serin.formats.captures import captures_folder
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.monitoring.capture.recorder import Recorder
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release
from tests.kit.waiting import Clock
from tests.unit.monitoring.capture.spooling import NOON, Backend, keep_all, log_line, request


def recorder(home: Path, **options: object) -> Recorder:
    return Recorder(home, home / "requests.jsonl", keep_all, settle_s=0.0, **options)  # type: ignore[arg-type]


def ages(home: Path) -> list[int]:
    return sorted(captured(home, "taxis", columns=["age"])["age"].to_pylist())


def test_rows_have_their_columns_answers_and_the_lines_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(log_line(7, NOON, arm="candidate"))
    Backend(tmp_path).leave([request(7, NOON, rows=2), request(8, NOON + 1)])
    assert recorder(tmp_path).record(NOON + 9).requests == 2
    rows = captured(tmp_path, "taxis").drop_columns(["_t"]).to_pylist()
    logged = {"_arm": "candidate", "_epoch": 4, "_status": 200, "_latency_ms": 2.5, "_client_id": "mine-7"}
    assert rows[1] == {
        "_id": "id-7", "_row": 1, "_release": "taxis-v1", "_source": "live", **logged,
        "name": "n7", "age": 7001, "fare": 1.75, "_answer_score": 2.75,
    }  # fmt: skip
    assert [row["_row"] for row in rows] == [0, 1, 0]
    assert rows[2]["_id"] == "id-8"
    assert [rows[2][name] for name in logged] == [None] * 5
    assert not list((tmp_path / "spool").rglob("*.rows"))


def test_requests_of_two_hours_and_two_releases_are_kept_apart(tmp_path: Path) -> None:
    Backend(tmp_path).leave([request(1, NOON - 1), request(2, NOON)])
    Backend(tmp_path, "taxis-v2-baseline").leave([request(3, NOON)])
    assert recorder(tmp_path).record(NOON).requests == 3
    folders = sorted(
        str(path.parent.relative_to(captures_folder(tmp_path, "taxis")))
        for path in captures_folder(tmp_path).rglob("*.parquet")
    )
    assert folders == ["1/2026-03-01T11", "1/2026-03-01T12", "2/2026-03-01T12"]
    assert set(captured(tmp_path, "taxis")["_release"].to_pylist()) == {"taxis-v1", "taxis-v2-baseline"}


def test_a_file_waits_until_the_log_may_have_its_lines(tmp_path: Path) -> None:
    clock = Clock()
    late = Recorder(tmp_path, tmp_path / "requests.jsonl", keep_all, settle_s=2.0, clock=clock)
    Backend(tmp_path).leave([request(1, NOON)])
    assert late.record(NOON).requests == 0
    (tmp_path / "requests.jsonl").write_text(log_line(1, NOON))
    clock.t = 2.1
    assert late.record(NOON).requests == 1
    assert captured(tmp_path, "taxis")["_arm"].to_pylist() == ["stable"]


def test_masked_columns_are_null_and_dropped_ones_are_missing(tmp_path: Path) -> None:
    Backend(tmp_path).leave([request(1, NOON)])
    hidden = CaptureSpec(share=1, mask=("name", "age"), drop=("fare",))
    Recorder(tmp_path, tmp_path / "none", lambda _: hidden, settle_s=0).record(NOON)
    (row,) = captured(tmp_path, "taxis").to_pylist()
    assert (row["name"], row["age"], "fare" in row) == (None, None, False)
    assert not any(b"n1" in path.read_bytes() for path in tmp_path.rglob("*.parquet"))


def test_what_a_backend_dropped_and_what_a_torn_file_lost_is_counted(tmp_path: Path) -> None:
    backend = Backend(tmp_path, share=0.5)
    backend.leave([request(1, NOON)], dropped=4)
    backend.leave([request(2, NOON), request(3, NOON)], cut=5)
    backend.leave([request(4, NOON)])
    (backend.folder / "00000004.rows").write_text("not a spool file")
    assert recorder(tmp_path).record(NOON).requests == 2
    view = read_captures(tmp_path, "taxis")
    assert (view.requests, view.rows, view.dropped, view.damaged) == (2, 2, 6, 2)
    assert view.releases["taxis-v1"].share == 0.5
    assert backend.sent == view.requests + view.dropped


def test_a_version_that_no_longer_exists_is_counted_as_dropped(tmp_path: Path) -> None:
    def settings(release: Release) -> CaptureSpec | None:
        return None if release.version == 1 else CaptureSpec(share=1)

    Backend(tmp_path).leave([request(1, NOON)])
    Backend(tmp_path, "taxis-v2").leave([request(2, NOON)])
    Recorder(tmp_path, tmp_path / "none", settings, settle_s=0).record(NOON)
    view = read_captures(tmp_path, "taxis")
    assert (view.requests, view.dropped) == (1, 1)
    assert ages(tmp_path) == [2000]


def test_an_open_file_is_taken_over_when_its_writer_is_dead(tmp_path: Path) -> None:
    path = Backend(tmp_path).leave([request(1, NOON)], end=".open")
    os.utime(path, (NOON, NOON))
    assert recorder(tmp_path).record(NOON + 10).requests == 0
    assert recorder(tmp_path).record(NOON + 60).requests == 1


def test_a_clock_that_jumps_by_hours_neither_loses_nor_doubles(tmp_path: Path) -> None:
    backend, keeper = Backend(tmp_path), recorder(tmp_path)
    jumps = (0, 5 * 3600, 5 * 3600, -7 * 3600, -7 * 3600, 0, 40 * 86400)
    for number, jump in enumerate(jumps):
        path = backend.leave([request(number, NOON + jump + number)])
        os.utime(path, (NOON + jump, NOON + jump))
        if number % 2:
            keeper.record(NOON + jump)
    for at in (NOON + 40 * 86400, NOON):
        recorder(tmp_path).record(at)
    assert ages(tmp_path) == [1000 * number for number in range(len(jumps))]


def test_files_of_a_writer_keep_their_order_when_the_clock_went_back(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    for number, t in ((1, NOON + 9000), (2, NOON)):
        path = backend.leave([request(number, t)])
        os.utime(path, (t, t))
    small = recorder(tmp_path, batch_bytes=1)  # a commit for each file
    assert small.record(NOON).requests == 2
    assert ages(tmp_path) == [1000, 2000]


def test_a_time_that_is_not_a_number_is_replaced_by_the_files(tmp_path: Path) -> None:
    path = Backend(tmp_path).leave([request(1, float("nan")), request(2, -5.0), request(3, 1e300)])
    os.utime(path, (NOON, NOON))
    assert recorder(tmp_path).record(NOON).requests == 3
    hours = sorted(path.parent.name for path in tmp_path.rglob("*.parquet"))
    assert hours == ["1970-01-01T00", "2026-03-01T12", "9999-01-01T00"]


def test_a_folder_that_cannot_be_written_keeps_the_spool_and_is_tried_again(tmp_path: Path) -> None:
    clock = Clock()
    keeper = recorder(tmp_path, clock=clock)
    Backend(tmp_path).leave([request(1, NOON)])
    Backend(tmp_path, "buses-v1").leave([request(2, NOON)])
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
    spooled = Backend(tmp_path).leave([request(number, NOON) for number in range(300)])
    with no_file_larger_than(3000):
        outcome = keeper.record(NOON)
    assert (outcome.requests, list(outcome.failed)) == (0, ["taxis"])
    assert spooled.exists()
    assert not [path for path in captures_folder(tmp_path).rglob(".*") if path.is_file()]
    clock.t = 60.0
    assert keeper.record(NOON).requests == 300
    assert ages(tmp_path) == [1000 * number for number in range(300)]


def test_replayed_requests_are_marked(tmp_path: Path) -> None:
    Backend(tmp_path).leave([request(1, NOON, prefix="shadow-id")])
    recorder(tmp_path).record(NOON)
    assert captured(tmp_path, "taxis")["_source"].to_pylist() == ["shadow"]


@pytest.mark.parametrize("most", [50, 10**6])
def test_a_long_backlog_is_joined_with_a_bounded_part_of_the_log(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.monitoring.capture.recorder._READ_BYTES", 2000)
    backend, keeper = Backend(tmp_path), recorder(tmp_path, batch_bytes=2000)
    keeper._index._most = most
    numbers = range(400)
    (tmp_path / "requests.jsonl.1").write_text("".join(log_line(n, NOON + n) for n in numbers[:250]))
    (tmp_path / "requests.jsonl").write_text("".join(log_line(n, NOON + n) for n in numbers[250:]))
    for start in numbers[::10]:
        path = backend.leave([request(n, NOON + n) for n in range(start, start + 10)])
        os.utime(path, (NOON + start + 10, NOON + start + 10))
    assert keeper.record(NOON + 9000).requests == 400
    table = captured(tmp_path, "taxis", columns=["_arm", "_client_id"])
    assert table["_arm"].null_count == 0
    assert table["_client_id"].to_pylist() == [f"mine-{n}" for n in numbers]
    assert keeper._index.lines <= most + 10


@pytest.mark.parametrize("content", [b"", b'{"format": "serin.captures", "ver', b'{"other": 1}'])
def test_damaged_counters_are_named_and_left_and_nothing_is_lost(tmp_path: Path, content: bytes) -> None:
    backend, clock = Backend(tmp_path), Clock()
    backend.leave([request(1, NOON)])
    records = recorder(tmp_path, clock=clock)
    records.record(NOON)
    file = captures_folder(tmp_path, "taxis") / "counters.json"
    file.write_bytes(content)
    backend.leave([request(2, NOON)])
    Backend(tmp_path, "flights-v1").leave([request(3, NOON)])
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
