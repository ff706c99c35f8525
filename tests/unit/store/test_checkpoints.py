"""Trained weights that another host continues with."""

from pathlib import Path

import pytest

from serin.errors import BundleBroken, StoreUnreachable
from serin.store.checkpoints import checkpoint_names, fetch_checkpoint, publish_checkpoint, remove_checkpoint
from serin.store.store import Store


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")
    return Store(url, cache=tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step"
    (made / "more").mkdir(parents=True)
    (made / "state.json").write_text("{}")
    (made / "more" / "tensors").write_bytes(b"tensors" * 1000)
    return made


def test_another_host_gets_what_was_published(store: Store, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / "step"
    assert not fetch_checkpoint(store, "train-a/step-1", target)
    publish_checkpoint(store, "train-a/step-1", folder)
    publish_checkpoint(store, "train-a/step-2", folder)
    publish_checkpoint(store, "train-b/step-1", folder)
    assert checkpoint_names(store, "train-a/") == ["train-a/step-1", "train-a/step-2"]
    assert fetch_checkpoint(store, "train-a/step-1", target)
    assert (target / "more" / "tensors").read_bytes() == b"tensors" * 1000
    assert [path.name for path in target.parent.iterdir()] == ["step"]
    remove_checkpoint(store, "train-a/step-1")
    assert checkpoint_names(store, "train-a/") == ["train-a/step-2"]
    assert not fetch_checkpoint(store, "train-a/step-1", tmp_path / "again")


def test_the_first_writer_of_a_name_wins(store: Store, folder: Path, tmp_path: Path) -> None:
    publish_checkpoint(store, "train-a/result", folder)
    (folder / "state.json").write_text("[]")
    publish_checkpoint(store, "train-a/result", folder)
    assert fetch_checkpoint(store, "train-a/result", tmp_path / "there")
    assert (tmp_path / "there" / "state.json").read_text() == "{}"


def test_a_broken_upload_is_not_seen(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> str:
        raise StoreUnreachable(url=store.url, reason="cut")

    with monkeypatch.context() as patched:
        patched.setattr(type(store.shared_files()), "create", cut)
        with pytest.raises(StoreUnreachable):
            publish_checkpoint(store, "train-a/step-1", folder)
    assert checkpoint_names(store, "train-a/") == []
    assert not fetch_checkpoint(store, "train-a/step-1", tmp_path / "there")


def test_damaged_bytes_are_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    publish_checkpoint(store, "train-a/step-1", folder)
    files = store.shared_files()
    (key,) = [key for key in files.keys("checkpoints/") if key.endswith("tensors")]
    files.put(key, b"TENSORS" * 1000)
    with pytest.raises(BundleBroken, match="more/tensors"):
        fetch_checkpoint(store, "train-a/step-1", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_all_who_claim_the_same_version_get_one_number(store: Store, tmp_path: Path) -> None:
    first = store.reserve_version("m", claim="a" * 32)
    assert store.reserve_version("m") == first + 1
    assert Store(store.url, cache=tmp_path / "other").reserve_version("m", claim="a" * 32) == first
    assert store.reserve_version("m", claim="b" * 32) == first + 2
