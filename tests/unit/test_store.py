import json
import os
from pathlib import Path

import pytest

from serin.errors import BundleBroken, NameInvalid, NotFound, StoreNotWritable
from serin.store.artifacts import Dataset, Release
from serin.store.retention import Policy, collect_garbage
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks
from tests.unit.store.test_remote_store import DIGEST, KEY, publish_dataset


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("bucket")
    return Store(url, cache=tmp_path / "cache")


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
    path = publish_dataset(store)
    published = store.find_dataset(KEY)
    assert published == Dataset(path=str(path), digest=DIGEST, rows={"train": 3})
    assert (path / "train/part").read_text() == "rows"


def test_a_failure_while_filling_publishes_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), store.workspace() as folder:
        (folder / "dataset.json").write_text("{}")
        raise RuntimeError("half way")
    assert store.find_dataset(KEY) is None
    assert not folder.exists()


def test_versions_rise_and_are_never_reused(store: Store) -> None:
    assert store.reserve_version("m") == 1  # given out and never published, as after a crash
    assert publish_version(store) == 2
    assert publish_version(store) == 3
    assert store.versions("m") == [2, 3]
    assert store.models() == ["m"]


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


def test_an_edition_has_a_number_and_an_alias_and_the_version_stays_as_it_was(store: Store) -> None:
    version = publish_version(store)
    assert store.reserve_edition("m", version) == 2  # given out and never published, as after a crash
    edition = store.reserve_edition("m", version)
    with store.workspace() as folder:
        fill_bundle(folder)
        made = store.publish_bundle("m", f"{version}e{edition}", folder)
    assert (made.release.name, store.editions("m", version)) == (f"m-v{version}e3", [1, 3])
    assert store.versions("m") == [version]
    store.set_alias("m", "live", made.release.label)
    assert store.bundle("m", "live") == made
    assert store.bundle("m", version).edition == 1
    assert store.aliases("m") == {"live": version}
    assert store.aliased("m") == {"live": made.release}
    with pytest.raises(NotFound, match=f"{version}e9"):
        store.set_alias("m", "live", f"{version}e9")
    with pytest.raises(BundleBroken, match="never change"), store.workspace() as folder:
        fill_bundle(folder)
        store.publish_bundle("m", made.release.label, folder)


@pytest.mark.parametrize(
    ("name", "edition"), [("m-v3", 1), ("m-v3e2", 2), ("m-v3e2-baseline", 2), ("a-v1e2-v3e12", 12)]
)
def test_the_name_of_a_release_has_its_edition(name: str, edition: int) -> None:
    release = Release.parse(name)
    assert (release.name, release.version, release.edition) == (name, 3, edition)


@pytest.mark.parametrize("name", ["m-v3e1", "m-v3e0", "m-v3e", "m-v3e02", "m-ve2"])
def test_a_release_has_one_name(name: str) -> None:
    with pytest.raises(NameInvalid, match="release"):
        Release.parse(name)


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
            (folder / "dataset.json").write_text("{}")
            with full.open("wb", buffering=0) as device:
                device.write(b"x")
        assert store.find_dataset(KEY) is None
        assert not folder.exists()
    finally:
        store.remove("")


def test_gc_keeps_what_is_aliased_recent_or_the_source_of_a_kept_version(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for key, digest in (("1" * 64, DIGEST), ("2" * 64, "c" * 64)):
        publish_dataset(store, digest=digest, key=key)
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
