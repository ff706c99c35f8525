"""kill -9 at every change that the recorder, a merge or a deletion makes to the disk: each row stays exactly once."""

import multiprocessing
import shutil
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from serin.formats.captures import COUNTERS, LOCK, SCRATCH, captures_folder
from serin.formats.serving.ring import ring_files
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.forget import forget
from serin.monitoring.capture.merge import tidy
from serin.monitoring.capture.read import captured, parts, read_part
from serin.monitoring.capture.retention import HomeHours
from tests.unit.monitoring.capture.killed import die_at, forget_some, record
from tests.unit.monitoring.capture.worker import NOON, Worker, request

NUMBERS = range(12)


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Children that have everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.monitoring.capture.killed"])
    return context


def kill_everywhere(step: str, start: Path, forks: ForkServerContext, check: Callable[[Path], None]) -> int:
    """Runs `step` on copies of `start`, killed at the first, second, ... change until it survives."""
    for change in range(1, 200):
        home = start.with_name(f"{step}-{change}")
        copy_home(start, home)
        child = forks.Process(target=die_at, args=(step, str(home), change))
        child.start()
        child.join(120)
        assert child.exitcode in (0, -signal.SIGKILL)
        check(home)
        shutil.rmtree(home)
        if child.exitcode == 0:
            return change
    raise AssertionError("never survived")


def copy_home(start: Path, home: Path) -> None:
    """A copy with its own memory. Its writer has ended."""
    shutil.copytree(start, home, symlinks=True)
    (home / "stack" / "sockets").unlink()
    (home / "stack" / "sockets").symlink_to(home / "memory")


def ages(home: Path) -> list[int]:
    table = captured(home, "taxis", columns=["age"])
    return table["age"].to_pylist() if table.num_rows else []


def is_exact(home: Path) -> None:
    """The next watcher completes what was begun."""
    record(home)
    tidy(home, "taxis")
    assert ages(home) == [1000 * number for number in NUMBERS]
    view = read_captures(home, "taxis")
    assert (view.requests, view.rows, view.dropped, view.damaged) == (len(NUMBERS), len(NUMBERS), 2, 0)
    assert ring_files(home) == []
    assert not [path for path in captures_folder(home).rglob("*") if path.name.startswith(SCRATCH)]


def is_consistent(home: Path) -> None:
    """Before anybody cleans up: what is counted can be read and deleted, and no file has what was deleted."""
    before = ages(home)
    view = read_captures(home, "taxis")
    assert len(before) == (view.rows if view else 0)
    copy = home.with_name("forgetting")
    copy_home(home, copy)
    gone = forget(HomeHours(copy, "taxis"), "age < 3000").rows
    assert gone == sum(age < 3000 for age in before)
    assert ages(copy) == on_disk(copy) == [age for age in before if age >= 3000]
    shutil.rmtree(copy)


def answered(home: Path) -> None:
    worker = Worker(home)
    for start in NUMBERS[::6]:
        worker.leave([request(n, NOON - 1 + n // 8) for n in range(start, start + 6)], dropped=start // 3)
    worker.ring.end()


def test_every_request_is_recorded_once_wherever_the_recorder_is_killed(
    tmp_path: Path, forks: ForkServerContext
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    answered(start)

    def is_right(home: Path) -> None:
        is_consistent(home)
        is_exact(home)

    changes = kill_everywhere("record", start, forks, is_right)
    assert changes > 15


def test_a_merge_that_is_killed_neither_hides_nor_doubles_rows(
    tmp_path: Path, forks: ForkServerContext
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    answered(start)
    record(start)
    seen = parts(start, "taxis")[0]

    def follower_is_right(home: Path) -> None:
        assert ages(home) == [1000 * number for number in NUMBERS]  # before anything is cleaned up
        tables = [read_part(part, ["age"]) for part in parts(home, "taxis", after=seen.sequence)]
        after = [age for table in tables if table is not None for age in table["age"].to_pylist()]
        assert after == [1000 * number for number in NUMBERS if number >= seen.rows]
        is_exact(home)

    kill_everywhere("merge", start, forks, follower_is_right)


def on_disk(home: Path) -> list[int]:
    """The ages in all files of the records, also in those that readers leave out."""
    files = [path for path in captures_folder(home, "taxis").rglob("*") if path.is_file()]
    tables = [pq.read_table(path, columns=["age"]) for path in files if path.name not in (COUNTERS, LOCK)]
    return sorted(age for table in tables for age in table["age"].to_pylist())


@pytest.mark.parametrize("step", ["forget", "merge"])
def test_after_a_deletion_no_file_has_the_rows_whatever_was_killed_before(
    step: str, tmp_path: Path, forks: ForkServerContext
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    answered(start)
    record(start)

    def deleted_means_deleted(home: Path) -> None:
        kept = [1000 * number for number in NUMBERS if number not in (3, 4)]
        assert [age for age in ages(home) if age in kept] == kept
        forget_some(home)
        assert ages(home) == on_disk(home) == kept
        table = captured(home, "taxis")
        assert pc.min(table["_t"]).as_py() is not None

    kill_everywhere(step, start, forks, deleted_means_deleted)
