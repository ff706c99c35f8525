"""Records that hosts share through a store: every row is read once, whatever happens to an upload."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from serin.errors import BundleBroken, StoreUnreachable
from serin.formats.captures import captures_folder, in_force, read_document
from serin.formats.shared_captures import RECORDS, read_sharing
from serin.machine.ports import free_ports
from serin.monitoring.capture.retention import HomeHours, expire
from serin.spec.monitoring import CaptureSpec
from serin.store.store import Store
from tests.fakes.sharing_hosts import MODEL, NOON, Failing, SharingHost, ids

LATER = NOON + 86_400
Host = Callable[..., SharingHost]


class Killed(BaseException):
    pass


@pytest.fixture
def host(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Makes hosts that share a store on S3."""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "none"))
    return lambda name, **more: SharingHost(tmp_path, bucket, name, **more)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "none"))
    return lambda name, **more: SharingHost(tmp_path, str(tmp_path / "store"), name, **more)


def names(host: SharingHost) -> list[str]:
    return [file.name for file in host.records.listing(MODEL)]


def test_all_hosts_read_the_rows_of_all_hosts(host: Host) -> None:
    a, b, reader = host("a"), host("b"), host("reader")
    a.record(1, 2)
    b.record(1)
    b.record(2, t=NOON + 3600, version=2)
    assert (a.share(), b.share()) == ({}, {})
    assert reader.ids() == a.ids() == b.ids() == ["a1", "a2", "b1", "b2"]
    assert {file.writer.host for file in a.records.listing(MODEL)} == {"a", "b"}
    b.record(3)  # b reads what it has not uploaded, too
    assert (len(b.ids()), len(a.ids())) == (5, 4)
    assert reader.all_hosts().newest(2)["_id"].to_pylist() == ["a2", "b2"]
    assert reader.all_hosts().newest(1, version=1)["_id"].to_pylist() == ["a2"]
    hour = reader.all_hosts().tables(since=NOON + 3600, until=NOON + 7200)
    assert ids(hour) == ["b2"]
    views = {view.host: view for view in reader.all_hosts().views()}
    assert {name: [kept.rows for kept in view.versions] for name, view in views.items()} == {
        "a": [2],
        "b": [1, 1],
    }


def test_the_small_files_of_an_hour_become_one_when_it_is_over(host: Host) -> None:
    a, reader = host("a"), host("reader")
    for number in range(1, 5):
        a.send(number)
        assert len(reader.ids()) == number
    a.record(5)
    a.record(6)
    a.share()  # rows that came together go together
    assert len(names(a)) == 5
    a.merge()
    a.share(LATER)
    assert names(a) == ["000000000001-000000000006-6.parquet"]
    assert reader.ids() == ["a1", "a2", "a3", "a4", "a5", "a6"]
    a.record(7)  # late rows of the same hour
    a.merge()
    a.share(LATER)
    assert reader.ids() == ["a1", "a2", "a3", "a4", "a5", "a6", "a7"]
    assert len(names(a)) == 1


def test_a_merge_between_two_uploads_sends_the_new_rows_alone(in_folder: Host) -> None:
    a, reader = in_folder("a"), in_folder("reader")
    a.send(1)
    a.record(2)
    a.record(3, t=NOON + 3600)
    a.merge()
    a.share()
    assert [(file.first, file.last, file.rows) for file in in_force(a.records.listing(MODEL))] == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 3, 1),
    ]
    assert reader.ids() == ["a1", "a2", "a3"]


@pytest.mark.parametrize("done", [False, True])
def test_an_upload_that_is_cut_short_anywhere_doubles_and_loses_no_row(in_folder: Host, done: bool) -> None:
    a, reader = in_folder("a"), in_folder("reader")
    before: list[str] = []
    for fails in range(1, 9):
        failure = Killed() if fails % 2 else StoreUnreachable(url="s3://x", reason="away")
        number = 10 * fails
        a.record(number, number + 1)
        a.record(number + 2, t=NOON + 3600)
        a.record(number + 3)
        with pytest.raises((Killed, StoreUnreachable)):
            for time in (NOON + 60, LATER):  # the hours are over the second time
                if time == LATER:
                    a.merge()
                a.share(time, wrap=Failing.at(fails, done=done, error=failure))
            raise Killed
        found = reader.ids()
        assert len(found) == len(set(found))
        assert set(before) <= set(found) <= set(a.ids())
        if isinstance(failure, Killed):
            a.restart()
        a.merge()
        a.share(LATER)
        before = reader.ids()
        assert before == a.ids()
        assert len(names(a)) == 2
    assert len(before) == 32


def test_rows_wait_here_while_the_store_is_away(in_folder: Host) -> None:
    a, reader = in_folder("a"), in_folder("reader")
    a.send(1)

    away = Failing.at(1, done=False, error=StoreUnreachable(url="s3://x", reason="away"))
    a.record(2)
    with pytest.raises(StoreUnreachable):
        a.share(wrap=away)
    assert reader.ids() == ["a1"]
    a.send(3)
    assert reader.ids() == ["a1", "a2", "a3"]


def test_a_store_that_does_not_answer_fails_the_round_alone(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serin.store.bucket import Timing

    quick = Timing(connect_s=1, read_s=1, attempts=1, patience_s=0)
    monkeypatch.setattr("serin.store.bucket.PATIENT", quick)
    a = SharingHost(tmp_path, bucket, "a")
    a.record(1)
    (port,) = free_ports(1)
    with monkeypatch.context() as away:
        away.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(StoreUnreachable):
            a.share()
    a.share()
    assert SharingHost(tmp_path, bucket, "reader").ids() == ["a1"]


def test_rows_that_are_deleted_here_before_they_were_uploaded_are_counted(in_folder: Host) -> None:
    a = in_folder("a")
    a.send(1, 2)
    a.record(3, 4, 5)
    expire(HomeHours(a.home, MODEL), CaptureSpec(keep=1 * 86_400), LATER + 7200)
    assert read_document(a.home, MODEL)["lost_rows"] == 3
    a.share()
    (view,) = in_folder("reader").all_hosts().views()
    assert (view.host, view.lost_rows) == ("a", 3)
    assert a.ids() == ["a1", "a2"]  # what was deleted here to make room is read from the store


def test_limits_hold_for_the_records_of_all_hosts_together(in_folder: Host) -> None:
    a, b = in_folder("a"), in_folder("b")
    for number, each in enumerate((a, b, a, b)):
        each.send(number, t=NOON + number * 3600)
    sizes = [file.size for file in a.records.listing(MODEL)]
    a.limits = CaptureSpec(share=1, keep=100000 * 86_400, max_size=sum(sizes) - 1)
    a.share(care=True)
    assert in_folder("reader").ids() == ["a2", "b1", "b3"]
    b.limits = CaptureSpec(share=1, keep=1 * 86_400)
    b.share(NOON + 86_400 + 2.5 * 3600, care=True)
    assert in_folder("reader").ids() == ["a2", "b3"]


def test_a_file_that_was_damaged_in_the_store_is_refused(host: Host) -> None:
    a, reader = host("a"), host("reader")
    a.send(1)
    (file,) = a.records.listing(MODEL)
    found = a.records.files.read(file.key)
    a.records.files.put(file.key, found.content[:-1] + b"?")
    with pytest.raises(BundleBroken, match="does not match its digest"):
        reader.ids()


def test_a_home_that_was_set_back_does_not_overwrite_what_it_uploaded_since(
    in_folder: Host, tmp_path: Path
) -> None:
    a, reader = in_folder("a"), in_folder("reader")
    a.send(1)
    shutil.copytree(a.home, tmp_path / "backup")
    a.send(2)
    shutil.rmtree(a.home)
    shutil.copytree(tmp_path / "backup", a.home)
    a.restart()
    a.send(3)
    a.send(4)
    assert reader.ids() == a.ids()
    assert a.ids() == ["a1", "a2", "a3", "a4"]


def test_copies_of_another_host_s_files_are_fetched_once(host: Host) -> None:
    a, reader = host("a"), host("reader")
    a.send(1)
    assert reader.ids() == ["a1"]
    (file,) = a.records.listing(MODEL)
    kept = a.records.files.read(file.key)
    a.records.files.put(file.key, b"x" * len(kept.content))  # nobody reads it again
    assert reader.ids() == ["a1"]
    assert reader.records.files.keys(f"{RECORDS}{MODEL}/a/")
    sharing = read_sharing(a.home, MODEL)
    assert sharing is not None
    assert (
        json.loads((captures_folder(a.home, MODEL) / "shared.json").read_text())["last"] == sharing.last == 1
    )
    assert Store(a.url, cache=reader.home / "cache").copies().root.is_dir()
