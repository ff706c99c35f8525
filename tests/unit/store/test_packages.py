"""Packages in a store: the same content is written once, and what is not what its digest says is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from serin.errors import NameInvalid, PackageRefused
from serin.store.packages import (
    MOST_BYTES,
    PackageManifest,
    fetch_package,
    inside_package,
    manifest_of,
    publish_package,
)
from serin.store.retention import Policy, collect_garbage
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks

CONTENTS = {
    "spec.yaml": b"name: flights\n",
    "net.py": b"WIDTH = 8\n",
    "imports/packed_steps.py": b"STEPS = 3\n",
}
DIGEST = manifest_of(CONTENTS).digest


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")
    return Store(url, cache=tmp_path / "cache")


def elsewhere(store: Store, tmp_path: Path) -> Store:
    """The same store, seen by another host."""
    return Store(store.url, cache=tmp_path / "other-cache")


def write_raw(store: Store, manifest: bytes, **files: bytes) -> str:
    """A package as an attacker writes it; returns its digest, which is right."""
    digest = hashlib.sha256(manifest).hexdigest()
    for name, content in files.items():
        store.shared_files().put(f"packages/{digest}/{name}", content)
    store.shared_files().put(f"packages/{digest}/package.json", manifest)
    return digest


def raw_manifest(**files: Any) -> bytes:
    return json.dumps({"format": "serin.package", "version": 1, "files": files}).encode()


def listed(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def refuse(store: Store, tmp_path: Path, digest: str, words: str) -> None:
    """Nothing of it is on this host then."""
    host = elsewhere(store, tmp_path)
    with pytest.raises(PackageRefused, match=words):
        fetch_package(host, digest)
    kept = [path for path in (tmp_path / "other-cache").rglob("*") if path.is_file() and path.stat().st_size]
    assert kept == []
    assert not list(tmp_path.rglob("*escaped*"))


def test_a_package_is_written_once_and_read_by_another_host(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publish_package(store, CONTENTS)
    monkeypatch.setattr(type(store.shared_files()), "upload", lambda *_: pytest.fail("it was sent again"))
    assert not publish_package(elsewhere(store, tmp_path), dict(reversed(CONTENTS.items())))
    folder = fetch_package(elsewhere(store, tmp_path), DIGEST)
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert found == CONTENTS


def test_a_copy_that_was_changed_on_this_host_is_fetched_again(store: Store) -> None:
    publish_package(store, CONTENTS)
    file = fetch_package(store, DIGEST) / "net.py"
    file.write_bytes(b"WIDTH = 9\n")
    assert fetch_package(store, DIGEST) / "net.py" == file
    assert file.read_bytes() == CONTENTS["net.py"]


def test_within_a_package_its_files_and_modules_are_found(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish_package(store, CONTENTS)
    monkeypatch.setenv("SERIN_HOME", "relative-home")
    monkeypatch.chdir(tmp_path)
    with inside_package(store, DIGEST) as folder:
        import packed_steps  # type: ignore[import-not-found]

        assert (Path("spec.yaml").read_bytes(), packed_steps.STEPS) == (CONTENTS["spec.yaml"], 3)
        from serin.machine import environment

        assert environment.home() == tmp_path / "relative-home"
        assert environment.text(
            "PYTHONPATH",
        ).split(":")[:2] == [str(folder), str(folder / "imports")]  # type: ignore[union-attr]
        assert environment.text("SERIN_PACKAGE") == DIGEST
    assert Path.cwd() == tmp_path
    assert environment.text("SERIN_PACKAGE") is None


@pytest.mark.parametrize(
    "name",
    [
        "../escaped",
        "/tmp/escaped",
        "a/../../escaped",
        "a//escaped",
        ".env",
        "a/.git/escaped",
        "a\\escaped",
        "C:escaped",
        "package.json",
    ],
)
def test_a_name_that_leaves_the_package_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(NameInvalid):
        publish_package(store, {name: b"x"})
    digest = write_raw(store, raw_manifest(**{name: listed(b"x")}))
    refuse(store, tmp_path, digest, "bytes there|valid")


def test_a_file_that_is_a_folder_too_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NameInvalid):
        publish_package(store, {"a": b"x", "a/b": b"x"})


def test_a_changed_byte_is_refused(store: Store, tmp_path: Path) -> None:
    publish_package(store, CONTENTS)
    store.shared_files().put(f"packages/{DIGEST}/net.py", b"WIDTH = 9\n")
    refuse(store, tmp_path, DIGEST, "was changed")


def test_a_changed_manifest_is_refused(store: Store, tmp_path: Path) -> None:
    publish_package(store, CONTENTS)
    other = PackageManifest(files=manifest_of({**CONTENTS, "net.py": b"WIDTH = 9\n"}).files)
    store.shared_files().put(f"packages/{DIGEST}/package.json", other.to_bytes())
    refuse(store, tmp_path, DIGEST, "its manifest was changed")


def test_a_file_that_is_larger_than_listed_is_not_fetched(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_package(store, CONTENTS)
    store.shared_files().put(f"packages/{DIGEST}/net.py", b"0" * 1_000_000)
    monkeypatch.setattr(type(store.shared_files()), "download", lambda *_: pytest.fail("it was fetched"))
    refuse(store, tmp_path, DIGEST, "net.py has 1,000,000 bytes there and 10 in the manifest")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (raw_manifest(huge={"size": MOST_BYTES + 1, "sha256": "0" * 64}), "at most 2,000 with"),
        (raw_manifest(**{f"f{number}": listed(b"") for number in range(2001)}), "holds 2,001 files"),
        (b" " * 1_100_000, "its manifest has 1,100,000 bytes"),
        (b"[" * 100_000, "nested too deeply|not a serin|Recursion|Expecting"),
        (
            b'{"format": "serin.package", "version": 9, "files": {}}',
            "not a serin.package document of version 1",
        ),
    ],
)
def test_a_manifest_that_no_package_has_is_refused(
    store: Store, tmp_path: Path, manifest: bytes, words: str
) -> None:
    refuse(store, tmp_path, write_raw(store, manifest), words)


def test_a_link_in_the_stores_folder_brings_no_other_content(tmp_path: Path, home: Path) -> None:
    store = Store(str(tmp_path / "store"), cache=tmp_path / "cache")
    publish_package(store, CONTENTS)
    secret = tmp_path / "secret"
    secret.write_bytes(b"PASSWORD1\n")  # as long as the file
    file = tmp_path / "store" / "packages" / DIGEST / "net.py"
    file.unlink()
    file.symlink_to(secret)
    refuse(store, tmp_path, DIGEST, "was changed")


def test_a_package_that_is_not_there_is_named_with_the_store(store: Store) -> None:
    with pytest.raises(PackageRefused, match=r"there is none.*same SERIN_STORE") as refused:
        fetch_package(store, "f" * 64)
    assert store.url in str(refused.value)


def test_old_packages_are_garbage_unless_a_version_names_them(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"), cache=tmp_path / "cache")
    other = {**CONTENTS, "net.py": b"WIDTH = 16\n"}
    publish_package(store, CONTENTS)
    publish_package(store, other)
    with store.workspace() as folder:
        (folder / "manifest.json").write_text(json.dumps({"lineage": {"package": DIGEST}}))
        store.publish_bundle("m", store.reserve_version("m"), folder)
    assert collect_garbage(store, home, Policy(), remove=True) == []
    forget_own_locks()
    (gone,) = collect_garbage(store, home, Policy(keep_days=-1.0), remove=True)
    assert (gone.kind, gone.name) == ("package", manifest_of(other).digest)
    assert store.shared_files().names("packages/") == [DIGEST]
