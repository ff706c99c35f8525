"""Requests to delete rows on all hosts: what each of them does, also those that are away, or gone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serin.errors import StoreUnreachable
from serin.formats.captures import SCRATCH
from serin.formats.cluster.leader import Leader
from serin.formats.forget_requests import read_applied, write_request
from serin.formats.shared_captures import GONE
from serin.store.store import Store
from serin.watcher import share_duty
from serin.watcher.captures import forget_states
from serin.watcher.cluster_state import LEADER
from serin.watcher.share_duty import ShareDuty, shared_store
from tests.fakes.sharing_hosts import MODEL, NOON, Failing, SharingHost, followed_ids
from tests.kit.stacks import stack_in
from tests.unit.watcher.test_capture_duty import OpenAlerts

LATER = NOON + 86_400
Host = Callable[[str], SharingHost]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    return lambda name: SharingHost(tmp_path, str(tmp_path / "store"), name)


def ask(host: SharingHost, where: str = "passenger_id = 2") -> int:
    return write_request(host.records.files, MODEL, where, t=NOON, by="somebody").seq


def apply(host: SharingHost, now: float = NOON + 100) -> None:
    """Reads the request, and applies it when nothing can be on its way any more."""
    host.share(now)
    host.share(now + 3)


def on_disk(folder: Path) -> set[int]:
    """The passengers in all files of records, also in those that readers leave out."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"PAR1"]
    return {number for path in files for number in pq.read_table(path)["passenger_id"].to_pylist()}


def leave_unfinished(folder: Path) -> None:
    """Copies every file of records beside itself under the name that it has until it is complete."""
    for path in folder.rglob("*.parquet"):
        ends = "" if folder.name == "store" else f"{SCRATCH}0123456789abcdef"
        path.with_name(ends or f".{path.name}.0123456789ab").write_bytes(path.read_bytes())


def test_every_host_deletes_the_rows_here_and_in_what_it_uploaded(host: Host) -> None:
    a, b, reader = host("a"), host("b"), host("reader")
    for each in (a, b):
        each.record(1, 2)
        each.send(2)
    b.record(2, 3)  # not uploaded yet
    assert len(reader.ids()) == 6
    assert ask(reader) == 1
    apply(a)
    assert [each for each in reader.ids() if each[0] == "a"] == ["a1"]
    assert [state.waiting for state in forget_states(reader.records, MODEL)] == [("b",)]
    apply(b)
    assert reader.ids() == a.ids() == b.ids() == ["a1", "b1", "b3"]
    applied = read_applied(reader.records.files, MODEL)[1]
    assert {name: (each.rows, each.problem) for name, each in applied.items()} == {"a": (2, ""), "b": (3, "")}
    assert forget_states(reader.records, MODEL)[0].waiting == ()


def test_rows_that_are_recorded_after_the_request_was_read_are_deleted_as_well(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, reader = host("a"), host("reader")
    a.send(1)
    ask(reader)
    waiting = [True]
    monkeypatch.setattr(share_duty, "are_recorded", lambda *_: not waiting[0])
    apply(a)
    assert read_applied(reader.records.files, MODEL) == {}  # requests are still in a ring
    a.record(2, 3)
    a.share(NOON + 110)
    assert reader.ids() == ["a1", "a3"]
    waiting[0] = False
    a.share(NOON + 120)
    assert read_applied(reader.records.files, MODEL)[1]["a"].rows == 1
    a.record(2)  # of another request, long after
    a.share(NOON + 130)
    assert reader.ids() == ["a1", "a2", "a3"]


@pytest.mark.parametrize("done", [False, True])
def test_a_deletion_that_is_cut_short_anywhere_is_completed_later(host: Host, done: bool) -> None:
    a, reader = host("a"), host("reader")
    for fails in range(1, 7):
        a.record(1, 2, t=NOON + 3600 * fails)
        a.send(2, t=NOON + 3600 * fails)
        ask(reader)
        with pytest.raises(KeyboardInterrupt):
            for now in (NOON + 100, NOON + 103):
                a.share(now, wrap=Failing.at(fails, done=done, error=KeyboardInterrupt()))
            raise KeyboardInterrupt
        a.restart()
        for place in (a.home, Path(a.url)):  # a process that is killed also leaves what it had begun to write
            leave_unfinished(place)
        apply(a)
        assert 2 not in on_disk(a.home) | on_disk(Path(a.url))
        a.merge()
        a.share(LATER + 86_400)
        assert reader.ids() == a.ids() == ["a1"] * fails
        assert forget_states(reader.records, MODEL)[-1].waiting == ()


def test_no_host_has_copies_of_deleted_rows_once_all_have_reported(host: Host) -> None:
    a, b = host("a"), host("b")
    a.record(1, 2)
    b.record(3)
    for each in (a, b, b):
        each.share()
    assert b.ids() == ["a1", "a2", "b3"]
    assert 2 in on_disk(b.home)
    ask(b)
    apply(b)
    assert forget_states(b.records, MODEL)[0].waiting == ("a",)
    assert 2 not in on_disk(b.home), "it has reported, although the other host has not deleted its rows"
    assert "a2" in b.ids()  # a command copies them again
    apply(a)
    b.share(NOON + 200)
    assert 2 not in on_disk(a.home) | on_disk(b.home) | on_disk(Path(a.url))
    assert forget_states(b.records, MODEL)[0].waiting == ()
    assert b.ids() == ["a1", "b3"]


def test_the_leading_watcher_deletes_the_rows_of_all_hosts_in_the_store_and_in_what_it_follows(
    host: Host,
) -> None:
    a, b = host("a"), host("b")
    b.lead()
    a.record(1, 2)
    b.record(3)
    for each in (a, b):
        each.share()
    assert b.ids() == followed_ids(b) == ["a1", "a2", "b3"]
    ask(b)
    apply(b)
    assert forget_states(b.records, MODEL)[0].waiting == ("a",)
    assert 2 not in on_disk(b.home) | on_disk(Path(a.url))
    assert b.ids() == followed_ids(b) == ["a1", "b3"]
    a.record(2, 4)  # it had read no request when it began to upload
    a._round._uploader.upload(MODEL, NOON + 110, limit=2)
    assert 2 in on_disk(Path(a.url))
    b.share(NOON + 120)
    assert 2 not in on_disk(b.home) | on_disk(Path(a.url))
    assert followed_ids(b) == ["a1", "a4", "b3"]
    apply(a)
    b.share(NOON + 200)
    assert 2 not in on_disk(a.home) | on_disk(b.home) | on_disk(Path(a.url))
    applied = read_applied(a.records.files, MODEL)[1]
    assert {name: each.rows for name, each in applied.items()} == {"a": 2, "b": 0}


def test_rows_that_a_host_has_only_in_the_store_are_counted_as_its_own(host: Host) -> None:
    a, b = host("a"), host("b")
    a.send(1, 2)
    shutil.rmtree(a.home)
    a.restart()
    b.lead()
    ask(b)
    apply(b)
    apply(a)
    applied = read_applied(a.records.files, MODEL)[1]
    assert {name: each.rows for name, each in applied.items()} == {"a": 1, "b": 0}


def test_nothing_is_deleted_before_the_leading_watcher_has_deleted_the_labels_and_the_store_has_that(
    host: Host,
) -> None:
    """If the leader is lost before, the next one finds the labels by rows that are still there."""
    a, b = host("a"), host("b")
    for each in (a, b):
        stack_in(each.home, agent=True)
        each.record(1, 2)
    for each in (a, b, a, b):
        each.share()
    files = a.records.files
    files.put(LEADER, Leader(holder="b/17-abc", term=1).dump())
    ask(a)
    apply(a)
    assert read_applied(files, MODEL) == {}
    assert 2 in on_disk(a.home)

    kept = list[tuple[bool, bool]]()
    led = b.lead(b.home / "cluster-watch")
    led.on_keep = lambda: kept.append((2 in on_disk(Path(a.url)), read_applied(files, MODEL) == {}))
    apply(b)
    b.lead_no_more()
    assert kept == [(True, True), (False, True)]
    assert list(read_applied(files, MODEL)[1]) == ["b"]
    apply(a)
    assert forget_states(a.records, MODEL)[0].waiting == ()


def test_another_host_deletes_the_rows_of_a_host_that_is_gone(host: Host) -> None:
    a, b, reader = host("a"), host("b"), host("reader")
    a.record(1, 2)
    b.record(1, 2)
    a.share()
    b.share()
    ask(reader)
    apply(a)
    assert reader.ids() == ["a1", "b1", "b2"]
    reader.records.files.put(f"{GONE}b.json", b"{}")
    a.share(NOON + 200)
    assert reader.ids() == ["a1", "b1"]
    applied = read_applied(reader.records.files, MODEL)[1]["b"]
    assert (applied.by, applied.rows) == ("a", 1)
    b.share(care=True)  # it comes back
    assert reader.records.files.keys(GONE) == []


def test_a_condition_that_cannot_be_computed_is_reported_once(host: Host) -> None:
    a = host("a")
    a.send(1)
    ask(a, "passenger_id + 1")
    apply(a)
    assert "is not a condition" in read_applied(a.records.files, MODEL)[1]["a"].problem
    assert a.ids() == ["a1"]


def test_a_host_without_the_column_has_nothing_to_delete(host: Host) -> None:
    a = host("a")
    a.send(1)
    ask(a, "tailnum = 'N1'")
    apply(a)
    applied = read_applied(a.records.files, MODEL)[1]["a"]
    assert (applied.rows, applied.problem) == (0, "")


def test_an_alert_says_that_records_are_not_uploaded_for_long(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, alerts = host("a"), OpenAlerts()
    a.record(1)
    monkeypatch.setenv("SERIN_STORE", "s3://somewhere")
    monkeypatch.setattr("serin.watcher.share_duty.shared_store", lambda home: Store(str(tmp_path / "store")))
    duty = ShareDuty(a.home, alerts)
    away = StoreUnreachable(url="s3://somewhere", reason="away")
    monkeypatch.setattr(duty, "_run", lambda store: None)
    duty._failed = {"": away}
    duty.tick(NOON)
    duty.tick(NOON + 30)
    assert alerts.open == {}
    duty.tick(NOON + 700)
    alert = alerts.open["taxis/capture/uploaded"]
    assert (alert.since, "up to monitoring.capture.max_size" in alert.text) == (NOON, True)
    duty._failed = {}
    duty.tick(NOON + 720)
    assert alerts.open == {}


def test_records_are_uploaded_to_s3_and_to_a_folder_that_agents_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERIN_STORE", raising=False)
    assert shared_store(tmp_path) is None
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    assert shared_store(tmp_path) is None
    monkeypatch.setenv("SERIN_STORE", "s3://store")
    assert shared_store(tmp_path) is not None
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    stack_in(tmp_path, agent=True)
    assert shared_store(tmp_path) is not None
