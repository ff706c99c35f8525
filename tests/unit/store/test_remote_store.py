"""A store on S3: what is seen of uploads, of two publishers and of damaged copies."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serin.errors import (
    BundleBroken,
    LeadershipLost,
    NotFound,
    ObjectExists,
    StoreNotWritable,
    StoreUnreachable,
)
from serin.machine.ports import free_ports
from serin.store import cache as cache_module
from serin.store.bucket import BucketFiles, Timing
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks

KEY, DIGEST = "a" * 64, "b" * 64


@pytest.fixture
def store(bucket: str, tmp_path: Path) -> Store:
    return Store(bucket, cache=tmp_path / "cache")


def on_another_host(store: Store, folder: Path) -> Store:
    return Store(store.url, cache=folder / "other")


def publish_dataset(store: Store, rows: str = "rows", digest: str = DIGEST, key: str = KEY) -> Path:
    with store.workspace() as folder:
        (folder / "train").mkdir()
        (folder / "train/part").write_text(rows)
        (folder / "dataset.json").write_text(json.dumps({"digest": digest, "splits": {"train": {"rows": 3}}}))
        return Path(store.publish_dataset(key, digest, folder).path)


def publish_version(store: Store, content: str = "graph", version: int | None = None) -> int:
    version = version or store.reserve_version("m")
    with store.workspace() as folder:
        (folder / "model.onnx").write_text(content)
        (folder / "manifest.json").write_text(json.dumps({"lineage": {"dataset": DIGEST}}))
        return store.publish_bundle("m", version, folder).version


def test_another_host_finds_what_was_published(store: Store, tmp_path: Path) -> None:
    published = publish_dataset(store)
    assert publish_version(store) == 1
    other = on_another_host(store, tmp_path)
    found = other.find_dataset(KEY)
    assert found.path != str(published)
    assert Path(found.path).name == DIGEST
    assert Path(found.path, "train/part").read_text() == "rows"
    assert Path(other.bundle("m", 1).path, "model.onnx").read_text() == "graph"
    assert (other.models(), other.versions("m"), other.datasets()) == (["m"], [1], [DIGEST])


def test_one_file_of_a_version_is_read_without_fetching_the_others(store: Store, tmp_path: Path) -> None:
    publish_version(store)
    other = on_another_host(store, tmp_path)
    assert json.loads(other.read_file("m", 1, "manifest.json") or b"")["lineage"] == {"dataset": DIGEST}
    assert (other.read_file("m", 1, "card.md"), other.read_file("m", 2, "manifest.json")) == (None, None)
    assert other.bundle_here("m", 1) is None


def test_nothing_is_seen_before_the_marker(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut(*_: object) -> str:
        raise StoreUnreachable(url=store.url, reason="cut")

    with monkeypatch.context() as patched:
        patched.setattr(BucketFiles, "create", cut)
        with pytest.raises(StoreUnreachable, match="cut"):
            publish_dataset(store)
        with pytest.raises(StoreUnreachable, match="cut"):
            publish_version(store, version=1)
    assert len(store.shared_files().keys("datasets/")) == 2  # the files are there
    assert (store.datasets(), store.versions("m"), store.models()) == ([], [], [])
    assert store.find_dataset(KEY) is None
    publish_dataset(store)
    assert on_another_host(store, tmp_path).find_dataset(KEY) is not None


def test_of_two_publishers_of_a_dataset_one_wins_and_both_find_it(store: Store, tmp_path: Path) -> None:
    """The last bits of some columns may differ between machines: files of two publishers must not be mixed."""
    hosts = [Store(store.url, cache=tmp_path / str(number)) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda n: publish_dataset(hosts[n], rows=f"rows {n}"), range(4)))
    seen = {(folder / "train/part").read_text() for folder in folders}
    assert len(seen) == 1
    assert on_another_host(store, tmp_path).datasets() == [DIGEST]


def test_a_version_that_another_published_first_is_found_only_if_it_is_the_same(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = on_another_host(store, tmp_path), BucketFiles.create
    contents = iter(["graph", "another graph"])

    def beaten(self: BucketFiles, key: str, content: bytes) -> str:
        if key.startswith("published/") and self is store.shared_files():
            publish_version(other, next(contents), version=int(key.rpartition("/")[2].split(".")[0]))
        return real(self, key, content)

    monkeypatch.setattr(BucketFiles, "create", beaten)
    assert publish_version(store, "graph", version=1) == 1
    with pytest.raises(BundleBroken, match="another process published other files"):
        publish_version(store, "graph", version=2)
    assert store.versions("m") == [1, 2]


def test_aliases_that_move_at_the_same_time_are_all_kept(store: Store, tmp_path: Path) -> None:
    for _ in range(3):
        publish_version(store)
    hosts = [Store(store.url, cache=tmp_path / str(number)) for number in range(3)]
    barrier = threading.Barrier(3)

    def move(host: Store, alias: str, version: int) -> None:
        barrier.wait()
        host.set_alias("m", alias, version)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(move, hosts, ["live", "candidate", "previous"], [3, 2, 1]))
    assert store.aliases("m") == {"live": 3, "candidate": 2, "previous": 1}


def test_a_leader_that_was_frozen_before_its_write_does_not_undo_the_next_one_s(
    store: Store, tmp_path: Path
) -> None:
    for _ in range(3):
        publish_version(store)
    store.set_alias("m", "live", 1)
    leads = [True]

    def frozen_after_the_check() -> None:
        if not leads[0]:
            raise LeadershipLost(leader="another")
        leads[0] = False
        on_another_host(store, tmp_path).set_alias("m", "live", 3)

    with pytest.raises(LeadershipLost):
        store.set_alias("m", "live", 2, check=frozen_after_the_check)
    assert store.aliases("m") == {"live": 3}


def test_a_retried_reservation_takes_no_number_of_another_writer(store: Store) -> None:
    assert [store.reserve_version("m") for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ObjectExists):
        store.shared_files().create("models/m/numbers/2", b"")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add"])
def test_a_damaged_copy_is_fetched_again(store: Store, tmp_path: Path, damage: str) -> None:
    publish_dataset(store)
    other = on_another_host(store, tmp_path)
    found = other.find_dataset(KEY)
    part = Path(found.path, "train/part")
    match damage:
        case "flip":
            part.write_text("ROWS")
        case "cut":
            os.truncate(part, 2)
        case "remove":
            part.unlink()
        case "add":
            Path(found.path, "train/more").write_text("x")
            part.write_text("?")
    assert other.find_dataset(KEY) == found
    assert part.read_text() == "rows"
    assert sorted(p.name for p in part.parent.iterdir()) == ["part"]


def test_a_copy_that_was_cut_short_is_completed_file_by_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_dataset(store)
    real, asked = BucketFiles.download, []

    def second_fails(self: BucketFiles, files: dict[str, Path]) -> None:
        asked.append(sorted(key.rpartition("/")[2] for key in files))
        if len(asked) == 1:
            first = next(iter(files))
            real(self, {first: files[first]})
            part = {**files}
            part[list(files)[1]].write_text("half")
            return
        real(self, files)

    monkeypatch.setattr(BucketFiles, "download", second_fails)
    found = on_another_host(store, tmp_path).find_dataset(KEY)
    assert found is not None
    assert asked == [["dataset.json", "part"], ["part"]]


def test_bytes_in_the_store_that_do_not_match_are_refused(store: Store, tmp_path: Path) -> None:
    publish_dataset(store)
    (key,) = [key for key in store.shared_files().keys("datasets/") if key.endswith("part")]
    store.shared_files().put(key, b"ROWS")
    with pytest.raises(BundleBroken, match="train/part in the store does not match its digest"):
        on_another_host(store, tmp_path).find_dataset(KEY)


def test_the_copies_that_were_used_longest_ago_make_room(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_CACHE_BYTES", "400")
    store, digests = Store(bucket, cache=tmp_path / "cache"), [letter * 64 for letter in "cde"]
    folders = [publish_dataset(store, rows=d[0] * 200, digest=d, key=d) for d in digests]
    assert all(folder.is_dir() for folder in folders)  # they were just used
    monkeypatch.setattr(cache_module, "_GRACE_S", -1.0)
    publish_version(store)
    assert all(folder.is_dir() for folder in folders)  # this process uses them
    forget_own_locks()
    publish_version(store)
    assert [folder.is_dir() for folder in folders] == [False, False, False]
    assert store.find_dataset("c" * 64) is not None


def test_a_version_that_is_here_is_used_while_the_store_does_not_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish_version(store)
    path = store.bundle("m", 1).path
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setattr("serin.store.bucket.PATIENT", Timing(connect_s=1, read_s=1, attempts=1, patience_s=0))
    offline = Store(store.url, cache=tmp_path / "cache")
    assert offline.bundle("m", 1).path == path
    with pytest.raises(StoreUnreachable, match="s3://"):
        offline.bundle("m", 2)
    Path(path, "model.onnx").unlink()
    with pytest.raises(StoreUnreachable):
        offline.bundle("m", 1)


def test_a_removed_version_is_gone_at_once_and_its_number_stays_taken(store: Store, tmp_path: Path) -> None:
    publish_version(store)
    publish_version(store)
    store.remove("models/m/versions/1")
    other = on_another_host(store, tmp_path)
    assert other.versions("m") == [2]
    with pytest.raises(NotFound):
        other.bundle("m", 1)
    assert store.reserve_version("m") == 3


def test_a_full_disk_under_the_cache_is_one_clear_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    publish_dataset(store)
    monkeypatch.setattr(shutil, "disk_usage", full)
    monkeypatch.setattr(BucketFiles, "download", full)
    with pytest.raises(StoreNotWritable, match=r"other.*No space left"):
        on_another_host(store, tmp_path).find_dataset(KEY)
