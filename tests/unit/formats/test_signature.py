"""Signed versions: who has signed what, and that no changed byte is loaded."""

import shutil
import subprocess
from pathlib import Path

import pytest

from serin.api.model import Model
from serin.cluster.version_settings import check_trusted, stored_timeouts
from serin.errors import BundleBroken, BundleUntrusted, NameInvalid, SerinError, SigningKeyUnfit
from serin.export.take_over import import_bundle
from serin.formats.bundle import verify_bundle
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from serin.store.trust import (
    Trust,
    create_key,
    fingerprint,
    public_pem,
    read_private_key,
    read_signatures,
    sign_version,
    signatures_of,
)
from tasks.versions import find_version
from tests.kit.commands import serin_main as serin
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL


class Scene:
    """A store with one version, a key `mine`, and a trust of that key."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.store = Store(url or str(folder / "store"), cache=folder / "cache")
        self.bundle = bundles.publish(self.store, bias=0.0)
        self.private = self.key(folder / "mine")
        self.trust = Trust(folder / "trusted-keys")
        self.trust.add("mine", folder / "mine.pub")

    @staticmethod
    def key(path: Path) -> Path:
        path.with_name(f"{path.name}.pub").write_text(public_pem(create_key(path)))
        return path

    def sign(self, key: Path | None = None) -> str:
        return sign_version(
            self.store, MODEL, 1, Path(self.bundle.path), read_private_key(key or self.private)
        )

    def load(self) -> Bundle:
        """As a release does before anything else."""
        bundle = self.store.bundle(MODEL, 1)
        assert self.trust.check(self.store, bundle) is not None
        assert verify_bundle(Path(bundle.path)).digest == bundle.digest
        return bundle


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_only_a_version_that_a_trusted_key_has_signed_is_loaded(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(BundleUntrusted, match="delays-v1 cannot be loaded: it is not signed; sign it with"):
        scene.load()
    other = scene.key(tmp_path / "other")
    scene.sign(other)
    name = fingerprint(read_private_key(other).public_key())[:16]
    with pytest.raises(BundleUntrusted, match=f"it is signed by {name}, which is not trusted"):
        scene.load()
    scene.sign()
    scene.sign()
    assert len(signatures_of(scene.store, scene.bundle) or ()) == 2, "each key signs once"
    scene.load()
    scene.trust.remove("mine")
    with pytest.raises(BundleUntrusted, match="which is not trusted"):
        scene.load()
    scene.trust.add("other", tmp_path / "other.pub")
    scene.load()
    scene.trust.end()
    assert scene.trust.check(scene.store, scene.bundle) is None, "signatures are not asked for"


def test_a_signature_is_of_one_version(scene: Scene) -> None:
    scene.sign()
    again = bundles.publish(scene.store, bias=0.0)
    content = scene.store.signatures(MODEL, 1)
    assert content is not None
    scene.store.change_signatures(MODEL, again.version, lambda _: content)
    with pytest.raises(BundleUntrusted, match="version or signature was changed"):
        scene.trust.check(scene.store, again)


def places(path: Path) -> list[int]:
    """All bytes of what is signed and of the signature; of other files, whose digests are signed, some."""
    size = path.stat().st_size
    signed = path.name == "manifest.json" or path.parent.name == "signatures"
    return list(range(size)) if signed else [*range(0, size, size // 12), size - 1]


def test_a_version_with_any_byte_changed_in_any_file_is_refused(scene: Scene) -> None:
    scene.sign()
    folder = Path(scene.bundle.path)
    signature = Path(scene.store.url) / "models" / MODEL / "signatures" / "1.json"
    files = [*(path for path in folder.rglob("*") if path.is_file()), signature]
    assert len(files) == 6
    count = 0
    for path in files:
        whole = path.read_bytes()
        for at in places(path):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(SerinError):
                scene.load()
            count += 1
        for cut in (b"", whole[:-1], whole + b"\n"):
            path.write_bytes(cut)
            with pytest.raises(SerinError):
                scene.load()
        path.write_bytes(whole)
        scene.load()
    print(f"{count} changed bytes in {len(files)} files, all refused")
    for name in ("more.txt", "signature.json"):
        (folder / name).write_text("x")
        with pytest.raises(SerinError, match=f"{name} is not in the manifest"):
            scene.load()
        (folder / name).unlink()


def test_a_whole_version_that_was_forged_is_refused(scene: Scene) -> None:
    """Files and manifest fit together, and the signature is another version's."""
    scene.sign()
    other = bundles.publish(scene.store, bias=2.0)
    folder = Path(scene.bundle.path)
    shutil.rmtree(folder)
    shutil.copytree(other.path, folder)
    manifest = folder / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace('"model_version": 2', '"model_version": 1'))
    verify_bundle(folder)
    with pytest.raises(BundleUntrusted, match="version or signature was changed"):
        scene.load()


def test_a_damaged_key_in_the_folder_is_shown_and_trusts_nobody(scene: Scene) -> None:
    scene.sign()
    (scene.trust.folder / "broken.pem").write_text("nonsense")
    scene.load()
    broken, good = scene.trust.keys()
    assert (broken.key, broken.name, good.trouble) == (None, "broken", None)
    assert "is not a public key in PEM" in str(broken.trouble)


def test_trust_that_the_environment_names_is_required_also_when_its_folder_is_missing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.sign()
    monkeypatch.setenv("SERIN_TRUSTED_KEYS", str(tmp_path / "none"))
    with pytest.raises(BundleUntrusted):
        Trust.open().check(scene.store, scene.bundle)
    monkeypatch.setenv("SERIN_TRUSTED_KEYS", str(scene.trust.folder))
    assert Trust.open().check(scene.store, scene.bundle) is not None


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o601])
def test_a_private_key_that_others_can_reach_is_refused(scene: Scene, mode: int) -> None:
    scene.private.chmod(mode)
    with pytest.raises(SigningKeyUnfit, match=rf"is open to others \(mode {mode:04o}\)"):
        read_private_key(scene.private)


def test_keys_of_other_kinds_are_refused_with_the_reason(scene: Scene, tmp_path: Path) -> None:
    assert scene.private.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SigningKeyUnfit, match="is there already; it was not changed"):
        create_key(scene.private)
    with pytest.raises(SigningKeyUnfit, match="cannot be written"):
        create_key(tmp_path / "no" / "folder")
    with pytest.raises(SigningKeyUnfit, match="cannot be read"):
        read_private_key(tmp_path / "none")
    other = tmp_path / "rsa"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "rsa", "-out", other, "-quiet"], check=True, capture_output=True
    )
    with pytest.raises(SigningKeyUnfit, match="is not an ed25519 key"):
        read_private_key(other)
    public = tmp_path / "mine.pub"
    public.chmod(0o600)
    with pytest.raises(SigningKeyUnfit, match="is not a private key in PEM"):
        read_private_key(public)
    with pytest.raises(SigningKeyUnfit, match="is a private key"):
        scene.trust.add("wrong", scene.private)
    with pytest.raises(SigningKeyUnfit, match="is there already; remove that key first"):
        scene.trust.add("mine", public)
    with pytest.raises(SigningKeyUnfit, match="there is no such trusted key"):
        scene.trust.remove("../mine")
    for name in ("", "../x", "X", "a.b"):
        with pytest.raises(NameInvalid, match="not a valid key name"):
            scene.trust.add(name, public)


def test_openssl_makes_keys_and_checks_signatures(scene: Scene, tmp_path: Path) -> None:
    key, public, signature = tmp_path / "k", tmp_path / "k.pub", tmp_path / "sig"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    scene.trust.add("openssl", public)
    name = scene.sign(key)
    scene.load()
    (made,) = signatures_of(scene.store, scene.bundle) or ()
    assert made.key == name
    signature.write_bytes(bytes.fromhex(made.signature))
    verifying = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-sigfile", signature]
    manifest = Path(scene.bundle.path) / "manifest.json"
    assert subprocess.run([*verifying, "-in", manifest], check=False, capture_output=True).returncode == 0


def test_new_versions_are_signed_before_they_are_published_where_a_key_is_configured(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_SIGNING_KEY", str(scene.private))
    taken = import_bundle(Path(scene.bundle.path), scene.store)
    trusted = scene.trust.check(scene.store, taken)
    assert trusted.name == "mine"
    scene.private.chmod(0o644)
    with pytest.raises(SigningKeyUnfit):
        import_bundle(Path(scene.bundle.path), scene.store)
    assert scene.store.versions(MODEL) == [1, 2], "nothing is published unsigned instead"


def test_versions_on_an_object_store_are_signed_too(bucket: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, bucket)
    with pytest.raises(BundleUntrusted):
        scene.load()
    scene.sign()
    scene.load()
    scene.store.change_signatures(MODEL, 1, lambda content: (content or b"").replace(b"a", b"b"))
    with pytest.raises(BundleUntrusted, match=r"damaged|not trusted|was changed"):
        scene.load()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"signatures": [1]}', b'{"signatures": [{"key": 1}]}']
)
def test_a_file_that_is_not_one_of_signatures_is_none(content: bytes) -> None:
    assert read_signatures(content) is None


def test_versions_are_signed_and_keys_trusted_from_the_command_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    bundles.publish(store, bias=0.0)
    store.set_alias(MODEL, "live", 1)
    key = str(tmp_path / "key")
    assert serin("models", "verify", MODEL) == 0
    assert "not signed" in capsys.readouterr().out
    assert serin("models", "sign", MODEL) == 2
    assert "name the private key with --key or SERIN_SIGNING_KEY" in capsys.readouterr().err
    assert serin("trust", "create", key) == 0
    assert serin("trust", "add", "ci", f"{key}.pub") == 0
    assert "delays-v1 is live and not signed by a trusted key" in capsys.readouterr().err
    assert serin("models", "verify", MODEL) == 1
    assert "it is not signed" in capsys.readouterr().err
    assert serin("predict", MODEL, "rows.csv", "--batch") == 1
    assert "delays-v1 cannot be loaded: it is not signed" in capsys.readouterr().err
    assert serin("models", "sign", f"{MODEL}:1", "--key", key) == 0
    assert serin("models", "verify", f"{MODEL}:1") == 0
    assert "signed by ci" in capsys.readouterr().out
    assert serin("trust", "list") == 0
    assert "ci" in capsys.readouterr().out
    assert serin("trust", "remove", "ci") == 0
    assert "no version is loaded" in capsys.readouterr().out
    assert serin("trust", "off") == 0
    assert not (home / "trusted-keys").exists()
    assert (
        Path(key).read_text()
        not in (home / "store").joinpath("models", MODEL, "signatures", "1.json").read_text()
    )


def copy_version(store: Store, *, model: str, version: int) -> None:
    """Copies version 1 and its signatures to another place of the store, as somebody who can write there may."""
    while store.reserve_version(model) < version:
        pass
    models = Path(store.url) / "models"
    shutil.copytree(models / MODEL / "versions" / "1", models / model / "versions" / str(version))
    content = store.signatures(MODEL, 1)
    assert content is not None
    store.change_signatures(model, version, lambda _: content)


@pytest.mark.parametrize(("model", "version"), [(MODEL, 2), ("other", 1)], ids=["number", "model"])
@pytest.mark.parametrize("trusting", [True, False])
def test_a_signed_version_that_was_copied_elsewhere_is_refused_by_every_reader(
    model: str,
    version: int,
    trusting: bool,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, key = Store.open(), Scene.key(tmp_path / "key")
    bundle = bundles.publish(store, bias=0.0)
    sign_version(store, MODEL, 1, Path(bundle.path), read_private_key(key))
    copy_version(store, model=model, version=version)
    store.set_alias(model, "live", version)
    if trusting:
        Trust.open().add("ci", tmp_path / "key.pub")
    rows, name = str(tmp_path / "rows.csv"), f"{model}:{version}"
    Path(rows).write_text("x\n1\n")
    commands = [
        ("models", "verify", name),
        ("models", "sign", name, "--key", str(key)),
        ("models", "show", name),
        ("models", "diff", name, name),
        ("predict", name, rows, "--batch"),
        ("predict", name, rows),
        ("explain", name, rows),
        ("labels", "add", name, rows),
        ("tune", name),
    ]
    for command in commands:
        assert serin(*command) == 1, command
        told = capsys.readouterr()
        assert f"it contains {MODEL} version 1, not {model} version {version}" in told.err, (command, told)
    for reads in (
        lambda: Model.load(model, version),
        lambda: store.bundle_here(model, version),
        lambda: stored_timeouts(store)(Release(model=model, version=version)),
        lambda: check_trusted(store)(Release(model=model, version=version)),
        lambda: find_version(model, version),
    ):
        with pytest.raises(BundleBroken, match=f"it contains {MODEL} version 1"):
            reads()
    assert serin("models", "list") == 0
    assert f"it contains {MODEL} version 1" in capsys.readouterr().out
