"""`serin gc` on S3: by age, the marker first, and never what another host has just used."""

import datetime as dt
from pathlib import Path

import pytest

from serin.errors import NotFound
from serin.store import bucket as bucket_module
from serin.store.bucket import BucketFiles
from serin.store.checkpoints import checkpoint_names, fetch_checkpoint, publish_checkpoint
from serin.store.packages import manifest_of, publish_package
from serin.store.remote_retention import collect_remote_garbage
from serin.store.retention import Policy
from serin.store.store import Store
from tests.unit.store.test_remote_store import publish_dataset, publish_version

PACKAGE = {"spec.yaml": b"name: m", "net.py": b"WIDTH = 8"}
POLICY = Policy(keep_versions=1, keep_days=7)
OLD, NEEDED = "c" * 64, "b" * 64  # digests of datasets; versions come from NEEDED


class Days:
    """So many days have passed since objects were written."""

    passed = 0.0


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> type[Days]:
    real = bucket_module._now
    monkeypatch.setattr(bucket_module, "_now", lambda: real() + dt.timedelta(days=Days.passed))
    monkeypatch.setattr(Days, "passed", 0.0)
    return Days


@pytest.fixture
def store(bucket: str, tmp_path: Path, home: Path) -> Store:
    made = Store(bucket, cache=tmp_path / "cache")
    publish_dataset(made, digest=NEEDED, key=NEEDED)
    publish_dataset(made, digest=OLD, key=OLD)
    for _ in range(3):
        publish_version(made)
    made.set_alias("m", "live", 1)
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "state").write_text("x")
    publish_checkpoint(made, "train-a/step-1", folder)
    publish_package(made, PACKAGE)
    return made


def garbage(store: Store, tmp_path: Path, *, remove: bool) -> set[tuple[str, str]]:
    found = collect_remote_garbage(store, tmp_path / "home", POLICY, remove=remove)
    assert all(entry.bytes > 0 for entry in found)
    return {(entry.kind, entry.name) for entry in found}


def test_what_is_old_and_not_needed_goes(store: Store, tmp_path: Path, days: type[Days]) -> None:
    assert garbage(store, tmp_path, remove=True) == set()
    days.passed = 9
    package = manifest_of(PACKAGE).digest
    expected = {
        ("version", "m-v2"),
        ("dataset", OLD),
        ("checkpoint", "train-a/step-1"),
        ("package", package),
    }
    assert garbage(store, tmp_path, remove=False) == expected
    assert store.versions("m") == [1, 2, 3]
    assert garbage(store, tmp_path, remove=True) == expected
    other = Store(store.url, cache=tmp_path / "other")
    assert (other.versions("m"), other.datasets(), checkpoint_names(other, "")) == ([1, 3], [NEEDED], [])
    with pytest.raises(NotFound):
        other.bundle("m", 2)
    keys = store.shared_files().keys("")
    assert not [key for key in keys if OLD in key and "keys/" not in key]
    assert not [key for key in keys if key.startswith(("checkpoints/", "models/m/versions/2/", "packages/"))]
    assert store.reserve_version("m") == 4


def test_what_another_host_uses_is_marked_as_used(store: Store, tmp_path: Path, days: type[Days]) -> None:
    days.passed = 6
    other = Store(store.url, cache=tmp_path / "other")
    renewed: list[str] = []
    real = BucketFiles.replace

    def replace(self: BucketFiles, key: str, content: bytes, tag: str) -> str:
        renewed.append(key)
        return real(self, key, content, tag)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BucketFiles, "replace", replace)
        assert other.find_dataset(OLD) is not None
        assert other.bundle("m", 2).version == 2
        assert fetch_checkpoint(other, "train-a/step-1", tmp_path / "there")
    assert sorted(renewed) == [
        "published/checkpoints/train-a/step-1.json",
        f"published/datasets/{OLD}.json",
        "published/models/m/versions/2.json",
    ]


def test_a_marker_that_is_read_while_it_is_judged_stays(
    store: Store, tmp_path: Path, days: type[Days], monkeypatch: pytest.MonkeyPatch
) -> None:
    days.passed = 9
    other, real = Store(store.url, cache=tmp_path / "other"), BucketFiles.replace
    found: list[object] = []

    def used_in_between(self: BucketFiles, key: str, content: bytes, tag: str) -> str:
        if key == f"published/datasets/{OLD}.json" and not found:
            found.append(None)
            found.append(other.find_dataset(OLD))
        return real(self, key, content, tag)

    monkeypatch.setattr(BucketFiles, "replace", used_in_between)
    assert ("dataset", OLD) not in garbage(store, tmp_path, remove=True)
    assert found[1] is not None
    assert other.datasets() == [NEEDED, OLD]


def test_uploads_that_were_cut_short_go_when_they_are_old(
    store: Store, tmp_path: Path, days: type[Days]
) -> None:
    files = store.shared_files()
    files.put(f"datasets/{'d' * 64}/{'0' * 16}/train/part", b"half")
    files.put(f"datasets/{NEEDED}/{'1' * 16}/train/part", b"of a slower publisher")
    assert garbage(store, tmp_path, remove=True) == set()
    days.passed = 9
    found = garbage(store, tmp_path, remove=True)
    assert {name for kind, name in found if kind == "unfinished upload"} == {
        f"datasets/{'d' * 64}",
        f"datasets/{NEEDED}",
    }
    again = Store(store.url, cache=tmp_path / "other").find_dataset(NEEDED)
    assert Path(again.path, "train/part").read_text() == "rows"
