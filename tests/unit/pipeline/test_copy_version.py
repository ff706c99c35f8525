"""Versions copied from store to store: the same bytes or nothing, who may, and what is left by a process that dies."""

import json
import os
import secrets
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from serin.cluster.version_settings import check_trusted
from serin.errors import (
    BundleBroken,
    BundleUntrusted,
    PolicyRefused,
    SerinError,
    VersionTaken,
)
from serin.formats.bundle import read_manifest, verify_bundle
from serin.formats.policy import Check, Policy, write_policy
from serin.pipeline.copy_version import _copy_files, copy_version
from serin.store.artifacts import Bundle, Release
from serin.store.bucket import BucketFiles
from serin.store.origin import read_origin
from serin.store.store import Store
from serin.store.trust import Trust, create_key, public_pem, read_private_key, sign_version, signatures_of
from tests.kit.threads import beside
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

PASSED = {"gate.json": json.dumps({"passed": True}).encode()}


def key(folder: Path, name: str) -> str:
    """Makes a pair of keys; returns the public one."""
    pem = public_pem(create_key(folder / name))
    (folder / f"{name}.pub").write_text(pem)
    return pem


def sign(store: Store, bundle: Bundle, private: Path) -> None:
    sign_version(store, bundle.model, bundle.version, Path(bundle.path), read_private_key(private))


def contents(bundle: Bundle) -> dict[str, bytes]:
    folder = Path(bundle.path)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def dev(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "dev"))


@pytest.fixture(params=["folder", "bucket"])
def prod(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "prod") if request.param == "folder" else request.getfixturevalue("bucket")
    return Store(url, cache=tmp_path / "cache")


def test_a_copy_is_the_same_version_and_knows_where_it_came_from(
    dev: Store, prod: Store, tmp_path: Path
) -> None:
    first, second = (bundles.publish(dev, bias=bias, extra=PASSED) for bias in (0.0, 1.0))
    key(tmp_path, "ci")
    sign(dev, second, tmp_path / "ci")
    done = copy_version(dev, prod, f"{MODEL}:2")
    assert done.ran
    assert (prod.models(), prod.versions(MODEL), dev.versions(MODEL)) == ([MODEL], [2], [1, 2])
    assert contents(prod.bundle(MODEL, 2)) == contents(second) != contents(first)
    assert signatures_of(prod, done.value) == signatures_of(dev, second) != ()
    assert verify_bundle(Path(done.value.path)).digest == second.digest
    (stop,) = read_origin(prod, MODEL, 2)
    assert stop.store == dev.url
    assert read_origin(dev, MODEL, 2) == ()
    assert prod.reserve_version(MODEL) == 3, "the number is taken there, too"


def test_a_second_copy_changes_nothing_but_brings_new_signatures(
    dev: Store, prod: Store, tmp_path: Path
) -> None:
    bundle = bundles.publish(dev, bias=0.0)
    copy_version(dev, prod, MODEL)
    before = prod.shared_files().keys("")
    again = copy_version(dev, prod, MODEL)
    assert (again.ran, again.value.digest) == (False, bundle.digest)
    assert prod.shared_files().keys("") == before
    key(tmp_path, "late")
    sign(dev, bundle, tmp_path / "late")
    copy_version(dev, prod, MODEL)
    assert len(signatures_of(prod, bundle) or ()) == 1


def test_two_copies_at_once_are_one_version(dev: Store, prod: Store, tmp_path: Path) -> None:
    bundles.publish(dev, bias=0.0)
    hosts = [Store(prod.url, cache=tmp_path / name) for name in ("a", "b", "c")]
    done: list[str] = []

    def copy(host: Store) -> None:
        done.append(copy_version(dev, host, MODEL).value.digest)

    with beside(*(lambda host=host: copy(host) for host in hosts)):
        pass
    assert len(done) == 3
    assert len(set(done)) == 1
    assert prod.versions(MODEL) == [1]


def test_a_version_with_one_byte_changed_in_any_file_is_refused_and_nothing_appears(
    dev: Store, prod: Store
) -> None:
    bundle = bundles.publish(dev, bias=0.0, extra=PASSED)
    for path in sorted(Path(bundle.path).rglob("*.*")):
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            flip(path, at)
            with pytest.raises(SerinError):
                copy_version(dev, prod, f"{MODEL}:1")
            path.write_bytes(whole)
        path.unlink()
        with pytest.raises(SerinError):
            copy_version(dev, prod, f"{MODEL}:1")
        path.write_bytes(whole)
    assert [name for name in prod.shared_files().keys("") if not name.startswith("locks/")] == []
    assert copy_version(dev, prod, MODEL).ran, "it is as it was"


def test_an_object_that_was_changed_in_the_source_bucket_is_refused(bucket: str, tmp_path: Path) -> None:
    staging = Store(bucket, cache=tmp_path / "publisher")
    bundles.publish(staging, bias=0.0)
    (name,) = [each for each in staging.shared_files().keys("models/") if each.endswith("golden.parquet")]
    whole = staging.shared_files().read(name)
    assert whole is not None
    staging.shared_files().put(name, whole.content[:-1] + b"x")
    prod = Store(str(tmp_path / "prod"))
    with pytest.raises(BundleBroken, match="does not match its digest"):
        copy_version(Store(bucket, cache=tmp_path / "copier"), prod, f"{MODEL}:1")
    assert prod.versions(MODEL) == []


def test_a_byte_that_changes_on_the_way_to_a_bucket_is_noticed_before_the_version_is_visible(
    dev: Store, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles.publish(dev, bias=0.0)
    prod, real = Store(bucket, cache=tmp_path / "cache"), BucketFiles.upload

    def altered(self: BucketFiles, files: Mapping[str, Path]) -> None:
        real(self, files)
        (name,) = [each for each in files if each.endswith("model.onnx")]
        self.put(name, files[name].read_bytes()[:-1] + b"x")

    with monkeypatch.context() as patched:
        patched.setattr(BucketFiles, "upload", altered)
        with pytest.raises(BundleBroken, match=r"model\.onnx was changed on its way"):
            copy_version(dev, prod, MODEL)
    assert (prod.versions(MODEL), prod.models()) == ([], [])
    assert copy_version(dev, prod, MODEL).ran


def test_files_are_copied_in_bounded_memory(dev: Store, tmp_path: Path) -> None:
    bundles.publish(dev, bias=0.0, extra={"weights.bin": secrets.token_bytes(1 << 20) * 48})
    prod = Store(str(tmp_path / "prod"))
    tracemalloc.start()
    try:
        copy_version(dev, prod, MODEL)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"48 MiB copied with at most {peak / 2**20:.1f} MiB")
    assert peak < 12 << 20


def test_a_file_that_grows_while_it_is_copied_is_not_read_to_its_end(dev: Store, tmp_path: Path) -> None:
    bundle = bundles.publish(dev, bias=0.0, extra={"weights.bin": b"w"})
    folder, work = Path(bundle.path), tmp_path / "work"
    manifest = read_manifest(folder)
    with (folder / "weights.bin").open("r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no place
    with pytest.raises(BundleBroken, match=r"weights\.bin was changed"):
        _copy_files(folder, work, manifest, bundle.digest)
    assert (work / "weights.bin").stat().st_size <= 1 << 20


def test_only_a_version_that_the_targets_signers_have_signed_is_copied(
    dev: Store, prod: Store, tmp_path: Path
) -> None:
    bundle = bundles.publish(dev, bias=0.0)
    write_policy(prod, Policy(signers={"staging": key(tmp_path, "staging")}))
    before = prod.shared_files().keys("")
    with pytest.raises(
        PolicyRefused, match=r"refuses delays-v1: it is not signed; let staging sign it: `serin mod"
    ):
        copy_version(dev, prod, MODEL)
    key(tmp_path, "ci")
    sign(dev, bundle, tmp_path / "ci")
    with pytest.raises(
        PolicyRefused, match=r"it is signed by [0-9a-f]{16}, which is not trusted; let staging sign"
    ):
        copy_version(dev, prod, MODEL)
    other = bundles.publish(dev, bias=0.0)
    sign(dev, other, tmp_path / "staging")
    content = dev.signatures(MODEL, other.version)
    assert content is not None
    dev.change_signatures(MODEL, 1, lambda _: content)
    with pytest.raises(PolicyRefused, match="version or signature was changed"):
        copy_version(dev, prod, f"{MODEL}:1")
    assert prod.shared_files().keys("") == before
    assert copy_version(dev, prod, f"{MODEL}:2").value.version == 2


def test_the_trusted_keys_of_the_machine_that_copies_hold_as_well(
    dev: Store, tmp_path: Path, home: Path
) -> None:
    bundle = bundles.publish(dev, bias=0.0)
    key(tmp_path, "mine")
    Trust(home / "trusted-keys").add("mine", tmp_path / "mine.pub")
    prod = Store(str(tmp_path / "prod"))
    with pytest.raises(BundleUntrusted, match="it is not signed"):
        copy_version(dev, prod, MODEL)
    sign(dev, bundle, tmp_path / "mine")
    assert copy_version(dev, prod, MODEL).ran


def report(verdict: str, **more: object) -> bytes:
    return json.dumps({"verdict": verdict, "reason": "it is worse in auc", **more}).encode()


GROUPS = json.dumps({"passed": True, "groups": {"max_gap": 0.1, "max_rate_gap": None}}).encode()
NO_LIMIT = json.dumps({"passed": True, "groups": {"max_gap": None, "max_rate_gap": None}}).encode()


@pytest.mark.parametrize(
    ("check", "files", "reason"),
    [
        ("gate", PASSED, None),
        ("gate", {}, "it has passed no gate of an export; the policy asks for the check 'gate'"),
        ("gate", {"gate.json": b"{}"}, "it has passed no gate"),
        ("champion", {"champion.json": report("better or equal")}, None),
        ("champion", {"champion.json": report("not compared")}, None),
        (
            "champion",
            {"champion.json": report("approved", approved_by="ann")},
            "ann published it although it is worse",
        ),
        ("champion", {}, "it has no report of a comparison"),
        ("groups", {"gate.json": GROUPS}, None),
        ("groups", {"gate.json": NO_LIMIT}, "its groups were held to no limit"),
        ("groups", PASSED, "its groups were held to no limit"),
    ],
)
def test_a_version_must_have_passed_the_checks_of_the_target(
    dev: Store, tmp_path: Path, check: Check, files: dict[str, bytes], reason: str | None
) -> None:
    bundles.publish(dev, bias=0.0, extra=files)
    prod = Store(str(tmp_path / "prod"))
    write_policy(prod, Policy(checks=(check,)))
    if reason is None:
        assert copy_version(dev, prod, MODEL).ran
        return
    with pytest.raises(PolicyRefused, match=reason):
        copy_version(dev, prod, MODEL)
    assert prod.versions(MODEL) == []


def test_a_version_that_came_another_way_is_refused_when_its_rollout_starts(tmp_path: Path) -> None:
    prod = Store(str(tmp_path / "prod"))
    bundle, check = bundles.publish(prod, bias=0.0), check_trusted(prod)
    release = Release(model=MODEL, version=1)
    check(release)
    write_policy(prod, Policy(signers={"ci": key(tmp_path, "ci")}))
    with pytest.raises(PolicyRefused, match="it is not signed; let ci sign it"):
        check(release)
    sign(prod, bundle, tmp_path / "ci")
    check(release)


def test_a_number_that_belongs_to_another_version_is_not_taken(dev: Store, prod: Store) -> None:
    bundles.publish(dev, bias=0.0)
    theirs = bundles.publish(prod, bias=1.0)
    with pytest.raises(VersionTaken, match=f"another version has its number .digest {theirs.digest[:12]}"):
        copy_version(dev, prod, MODEL)
    assert contents(prod.bundle(MODEL, 1)) == contents(theirs)
    assert prod.signatures(MODEL, 1) is None
    second = bundles.publish(dev, bias=0.0)
    assert prod.reserve_version(MODEL) == second.version
    with pytest.raises(VersionTaken, match="it was given out there"):
        copy_version(dev, prod, f"{MODEL}:2")
    assert prod.versions(MODEL) == [1]


def test_a_version_that_was_removed_can_be_copied_again(dev: Store, prod: Store) -> None:
    bundles.publish(dev, bias=0.0)
    copy_version(dev, prod, MODEL)
    prod.remove(f"models/{MODEL}/versions/1")
    assert prod.versions(MODEL) == []
    assert copy_version(dev, prod, MODEL).ran


KILLED = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from serin.pipeline.copy_version import _copy_files, copy_version
    from serin.store.objects import FolderObjects
    from serin.store.places import LocalPlaces
    from serin.store.store import Store
    dev, folder, count = sys.argv[1], Path(sys.argv[2]), 0
    def deadly(real):
        def step(*arguments, **options):
            global count
            count += 1
            if count == moment:
                os.kill(os.getpid(), 9)
            return real(*arguments, **options)
        return step
    os.fsync, os.link = deadly(os.fsync), deadly(os.link)
    Path.rename, Path.replace, Path.mkdir = deadly(Path.rename), deadly(Path.replace), deadly(Path.mkdir)
    for name in ("create", "put", "replace"):
        setattr(FolderObjects, name, deadly(getattr(FolderObjects, name)))
    LocalPlaces.publish = deadly(LocalPlaces.publish)
    for moment in range(1, 200):
        child = os.fork()
        if child == 0:
            copy_version(Store(dev), Store(str(folder / str(moment))), "delays")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -9, status
    print(moment)
""")


def test_a_copy_that_is_killed_at_any_step_shows_nothing_or_all_and_a_repeat_ends_it(
    dev: Store, tmp_path: Path
) -> None:
    bundle = bundles.publish(dev, bias=0.0)
    key(tmp_path, "ci")
    sign(dev, bundle, tmp_path / "ci")
    command = [sys.executable, "-c", KILLED, dev.url, str(tmp_path / "killed")]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    last, seen = int(said), set[bool]()
    for moment in range(1, last + 1):
        prod = Store(str(tmp_path / "killed" / str(moment)))
        seen.add(prod.versions(MODEL) == [1])
        if prod.versions(MODEL):
            assert signatures_of(prod, bundle), "it came with its signatures"
            assert read_origin(prod, MODEL, 1)
        copied = copy_version(dev, prod, MODEL).value
        assert contents(copied) == contents(bundle)
        assert signatures_of(prod, copied) == signatures_of(dev, bundle)
    print(f"killed at {last - 1} steps")
    assert last > 20
    assert seen == {False, True}


KILLED_AT = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from serin.pipeline.copy_version import _copy_files, copy_version
    from serin.store.bucket import BucketFiles
    from serin.store.store import Store
    dev, prod, cache, step = sys.argv[1:]
    real = getattr(BucketFiles, step.rstrip("+"))
    def deadly(self, *arguments):
        if step.endswith("+"):  # after it
            real(self, *arguments)
        os.kill(os.getpid(), 9)
    setattr(BucketFiles, step.rstrip("+"), deadly)
    copy_version(Store(dev), Store(prod, cache=Path(cache)), "delays")
""")


@pytest.mark.parametrize("step", ["upload", "upload+", "download", "create+"])
def test_a_copy_to_a_bucket_that_is_killed_shows_nothing_and_a_repeat_ends_it(
    dev: Store, bucket: str, tmp_path: Path, step: str
) -> None:
    """`create+`: after the first object that it creates, which is the number."""
    bundle = bundles.publish(dev, bias=0.0)
    command = [sys.executable, "-c", KILLED_AT, dev.url, bucket, str(tmp_path / "cache"), step]
    assert subprocess.run(command, env={**os.environ}, check=False, timeout=120).returncode == -9
    prod = Store(bucket, cache=tmp_path / "cache")
    assert (prod.models(), prod.versions(MODEL)) == ([], [])
    assert contents(copy_version(dev, prod, MODEL).value) == contents(bundle)
