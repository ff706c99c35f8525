import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from serin.errors import BundleBroken, NameInvalid, NotFound, StoreNotWritable
from serin.store.retention import Policy, collect_garbage
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks

KEY, DIGEST = "a" * 64, "b" * 64


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("bucket")
    return Store(url, cache=tmp_path / "cache")


def fill_dataset(folder: Path, digest: str = DIGEST) -> None:
    (folder / "train").mkdir()
    (folder / "train/part").write_text("rows")
    (folder / "dataset.json").write_text(json.dumps({"digest": digest, "splits": {"train": {"rows": 3}}}))


def fill_bundle(folder: Path, dataset: str = DIGEST) -> None:
    (folder / "manifest.json").write_text(json.dumps({"lineage": {"dataset": dataset}}))
    (folder / "metrics.json").write_text(json.dumps({"test_auc": 0.75}))


def publish_version(store: Store, model: str = "m") -> int:
    version = store.reserve_version(model)
    with store.workspace() as folder:
        fill_bundle(folder)
        store.publish_bundle(model, version, folder)
    return version


def test_a_dataset_is_found_by_its_key_once_published(store: Store) -> None:
    assert store.find_dataset(KEY) is None
    with store.workspace() as folder:
        fill_dataset(folder)
        published = store.publish_dataset(KEY, DIGEST, folder)
    assert store.find_dataset(KEY) == published
    assert published.rows == {"train": 3}
    assert Path(published.path, "train/part").read_text() == "rows"


def test_a_failure_while_filling_publishes_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), store.workspace() as folder:
        fill_dataset(folder)
        raise RuntimeError("half way")
    assert store.find_dataset(KEY) is None
    assert not folder.exists()


def test_versions_rise_and_are_never_reused(store: Store) -> None:
    assert store.reserve_version("m") == 1  # given out and never published, as after a crash
    assert publish_version(store) == 2
    assert publish_version(store) == 3
    assert store.versions("m") == [2, 3]
    assert store.models() == ["m"]


def test_concurrent_publishers_get_different_numbers(tmp_path: Path) -> None:
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.append(Store(str(tmp_path)).reserve_version("m")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 17))


def test_a_published_version_cannot_be_written_again(store: Store) -> None:
    version = publish_version(store)
    with pytest.raises(BundleBroken, match="never change"), store.workspace() as folder:
        fill_bundle(folder)
        store.publish_bundle("m", version, folder)


def test_a_bundle_is_read_by_number_and_by_alias(store: Store) -> None:
    version = publish_version(store)
    store.set_alias("m", "live", version)
    assert store.bundle("m", "live") == store.bundle("m", version)
    assert store.bundle("m", version).metrics == {"test_auc": 0.75}
    store.set_alias("m", "live", None)
    with pytest.raises(NotFound, match="live"):
        store.bundle("m", "live")


def test_a_model_name_that_is_nearly_right_is_corrected(store: Store) -> None:
    publish_version(store, "late-parcels")
    for version in ("live", 1):
        with pytest.raises(NotFound, match=r"no model 'late-parcel'; did you mean 'late-parcels'\?"):
            store.bundle("late-parcel", version)


def test_an_alias_points_only_to_what_is_published(store: Store) -> None:
    publish_version(store)
    with pytest.raises(NotFound, match="9"):
        store.set_alias("m", "live", 9)
    with pytest.raises(NameInvalid, match="alias"):
        store.set_alias("m", "newest", 1)


@pytest.mark.parametrize("name", ["../up", "a/b", "A", "", "a" * 64, "a\n", ".hidden", "a%2fb"])
def test_a_bad_model_name_never_becomes_a_path(store: Store, name: str) -> None:
    with pytest.raises(NameInvalid):
        store.reserve_version(name)
    with pytest.raises(NameInvalid):
        store.bundle(name, 1)


def test_no_write_permission_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)  # the tests may run as root, whom no mode stops
    with (
        pytest.raises(StoreNotWritable, match=r"Permission denied.*Nothing was published"),
        Store(str(tmp_path)).workspace(),
    ):
        pass


def test_a_full_disk_leaves_nothing_behind() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    store = Store(f"/dev/shm/serin-test-{os.getpid()}")
    try:
        with pytest.raises(StoreNotWritable, match="No space left"), store.workspace() as folder:
            fill_dataset(folder)
            with full.open("wb", buffering=0) as device:
                device.write(b"x")
        assert store.find_dataset(KEY) is None
        assert not folder.exists()
    finally:
        store.remove("")


def test_kill_while_publishing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from serin.store.store import Store
        moment, count = int(sys.argv[2]), 0
        real = os.fsync
        def fsync(descriptor):
            global count
            count += 1
            if count == moment: os.kill(os.getpid(), 9)
            real(descriptor)
        os.fsync = fsync
        store = Store(sys.argv[1])
        with store.workspace() as folder:
            (folder / "train").mkdir(); (folder / "train/part").write_text("rows")
            (folder / "dataset.json").write_text('{"digest": "%s", "splits": {"train": {"rows": 3}}}' % ("b" * 64))
            store.publish_dataset("a" * 64, "b" * 64, folder)
        print("published", count)
    """)
    outcomes = []
    for moment in range(1, 20):
        root = tmp_path / str(moment)
        done = subprocess.run(
            [sys.executable, "-c", script, str(root), str(moment)],
            capture_output=True,
            text=True,
            check=False,
        )
        found = Store(str(root)).find_dataset(KEY)
        outcomes.append(found is not None)
        if found is not None:
            assert Path(found.path, "train/part").read_text() == "rows"
        if done.returncode == 0:
            break
    else:
        pytest.fail("the publisher was never left to finish")
    assert outcomes[0] is False
    assert outcomes[-1] is True


def test_gc_keeps_what_is_aliased_recent_or_the_source_of_a_kept_version(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for key, digest in (("1" * 64, DIGEST), ("2" * 64, "c" * 64)):
        with store.workspace() as folder:
            fill_dataset(folder, digest)
            store.publish_dataset(key, digest, folder)
            os.utime(tmp_path / "store/datasets" / digest / "dataset.json", (0, 0))
    for _ in range(4):
        publish_version(store)
    store.set_alias("m", "live", 1)
    dead = tmp_path / "store/work/left"
    dead.mkdir(parents=True)
    store.lock("work/left").touch()  # nobody holds it
    forget_own_locks()
    policy = Policy(keep_versions=1, keep_days=1)
    planned = collect_garbage(store, tmp_path, policy, remove=False)
    assert {(entry.kind, entry.name) for entry in planned} == {
        ("version", "m-v2"),
        ("version", "m-v3"),
        ("dataset", "c" * 64),
        ("workspace", "left"),
    }
    assert store.versions("m") == [1, 2, 3, 4]
    collect_garbage(store, tmp_path, policy, remove=True)
    assert store.versions("m") == [1, 4]
    assert store.datasets() == [DIGEST]
    assert store.reserve_version("m") == 5
    assert not dead.exists()
