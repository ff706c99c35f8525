"""Signatures of model versions, and the keys that a stack trusts.

A signature is ed25519 over the manifest's bytes, which hold the digest of every file. It is kept in the store beside
the version, not in it: a published version never changes. OpenSSL makes and checks the same signatures. Trusted keys
are public keys in PEM, one file each, in `trusted-keys` of the home, or in the folder that SERIN_TRUSTED_KEYS names.
While there is such a folder, only versions that one of them has signed are loaded; when it is empty, none is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from serin.errors import BundleUntrusted, NameInvalid, SigningKeyUnfit
from serin.machine import environment
from serin.machine.durable import create_secret, make_private, write_whole
from serin.machine.typed_json import Document
from serin.store.artifacts import Bundle
from serin.store.store import Store

MANIFEST = "manifest.json"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_SUFFIX = ".pem"
_KEY, _SIGNATURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`key`: the fingerprint of the public key. Both are lower-case hexadecimal."""

    key: str
    signature: str

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key) or not _SIGNATURE.fullmatch(self.signature):
            raise ValueError("not the hexadecimal digits of a key and its signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signatures(Document, form="serin.signature"):
    signatures: tuple[Signature, ...]

    def dump(self) -> bytes:
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()


def fingerprint(key: Ed25519PublicKey) -> str:
    """Returns the SHA-256 of the key's 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def create_key(path: Path) -> Ed25519PublicKey:
    """Writes a new private key that only its owner reads. SigningKeyUnfit when the file is there already."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    if path.exists():
        raise SigningKeyUnfit(path=path, reason="is there already; it was not changed")
    try:
        create_secret(path, text)
    except OSError as error:
        raise SigningKeyUnfit(path=path, reason=f"cannot be written ({error.strerror})") from error
    if path.read_text() != text:
        raise SigningKeyUnfit(path=path, reason="is there already; it was not changed")
    return key.public_key()


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Reads a private key in PEM. One that others on the machine can read is refused: it may be theirs by now."""
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o027:
            reason = f"is open to others (mode {stat.S_IMODE(mode):04o}); make another key that is not (0600)"
            raise SigningKeyUnfit(path=path, reason=reason)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SigningKeyUnfit(path=path, reason=f"cannot be read ({error.strerror})") from error
    except TypeError as error:
        raise SigningKeyUnfit(path=path, reason="has a passphrase; write it out without one") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SigningKeyUnfit(path=path, reason="is not a private key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyUnfit(path=path, reason="is not an ed25519 key")
    return key


def read_public_key(content: bytes, path: Path) -> Ed25519PublicKey:
    """Reads a public key in PEM."""
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        words = "is a private key" if b"PRIVATE KEY" in content else "is not a public key in PEM"
        raise SigningKeyUnfit(path=path, reason=words) from error
    if not isinstance(key, Ed25519PublicKey):
        raise SigningKeyUnfit(path=path, reason="is not an ed25519 key")
    return key


def public_key_at(path: Path) -> Ed25519PublicKey:
    """Reads the file of a public key in PEM."""
    try:
        return read_public_key(path.read_bytes(), path)
    except OSError as error:
        raise SigningKeyUnfit(path=path, reason=f"cannot be read ({error.strerror})") from error


def public_pem(key: Ed25519PublicKey) -> str:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def sign_version(store: Store, model: str, version: int | str, folder: Path, key: Ed25519PrivateKey) -> str:
    """Signs the version whose files are in `folder`, which may be published later. Signatures of other keys stay.
    Returns the key's fingerprint."""
    name = fingerprint(key.public_key())
    made = Signature(key=name, signature=key.sign((folder / MANIFEST).read_bytes()).hex())
    add_signatures(store, model, version, (made,))
    return name


def sign_if_configured(store: Store, model: str, version: int | str, folder: Path) -> None:
    """Signs a version before it is published, where SERIN_SIGNING_KEY names a key."""
    path = environment.path("SERIN_SIGNING_KEY")
    if path is not None:
        sign_version(store, model, version, folder, read_private_key(path))


def signatures_of(store: Store, bundle: Bundle) -> tuple[Signature, ...] | None:
    """Returns the signatures; none when there are none; None when their file cannot be read."""
    content = store.signatures(bundle.model, bundle.release.label)
    return () if content is None else read_signatures(content)


def signer(
    bundle: Bundle, signatures: tuple[Signature, ...], keys: Mapping[str, Ed25519PublicKey]
) -> str | None:
    """Returns the fingerprint of the first of `keys` that has signed the version's manifest."""
    manifest = (Path(bundle.path) / MANIFEST).read_bytes()
    if hashlib.sha256(manifest).hexdigest() != bundle.digest:
        return None
    for each in signatures:
        if each.key in keys:
            try:
                keys[each.key].verify(bytes.fromhex(each.signature), manifest)
            except InvalidSignature:
                continue
            return each.key
    return None


def why_untrusted(signatures: tuple[Signature, ...] | None, keys: Mapping[str, Ed25519PublicKey]) -> str:
    """Returns why `signer` found none of `keys`."""
    if signatures is None:
        return "its file of signatures is damaged"
    if not signatures:
        return "it is not signed"
    if not any(each.key in keys for each in signatures):
        names = ", ".join(each.key[:16] for each in signatures)
        return f"it is signed by {names}, which is not trusted"
    return "its signature is not one of its manifest: version or signature was changed"


def add_signatures(store: Store, model: str, version: int | str, made: tuple[Signature, ...]) -> None:
    """Adds signatures of a version. Those of other keys stay."""
    names = {each.key for each in made}

    def added(content: bytes | None) -> bytes:
        others = () if content is None else read_signatures(content) or ()
        return _Signatures(signatures=(*(each for each in others if each.key not in names), *made)).dump()

    store.change_signatures(model, version, added)


def read_signatures(content: bytes) -> tuple[Signature, ...] | None:
    """Reads a file of signatures. None when it is not exactly as it was written."""
    try:
        found = _Signatures.load(content)
    except ValueError:
        return None
    return found.signatures if found.dump() == content else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """`key` None: the file is not a public key, with the reason in `trouble`."""

    name: str
    path: Path
    key: Ed25519PublicKey | None
    trouble: str | None = None

    @property
    def fingerprint(self) -> str | None:
        return None if self.key is None else fingerprint(self.key)


class Trust:
    """The trusted keys in `folder`. `fixed`: the folder is named by SERIN_TRUSTED_KEYS, which asks for signatures also
    when it is missing."""

    def __init__(self, folder: Path, *, fixed: bool = False) -> None:
        self.folder, self._fixed = folder, fixed

    @classmethod
    def open(cls) -> Trust:
        """The trust of this process: of SERIN_TRUSTED_KEYS or SERIN_HOME."""
        named = environment.path("SERIN_TRUSTED_KEYS")
        return cls(named, fixed=True) if named else cls(environment.home() / "trusted-keys")

    @property
    def is_required(self) -> bool:
        return self._fixed or self.folder.exists()

    def keys(self) -> list[TrustedKey]:
        found = []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                key, trouble = read_public_key(path.read_bytes(), path), None
            except (OSError, SigningKeyUnfit) as error:
                key, trouble = None, str(error)
            found.append(TrustedKey(name=path.stem, path=path, key=key, trouble=trouble))
        return found

    def add(self, name: str, source: Path) -> TrustedKey:
        """Trusts the key in `source`. From the first one on, only signed versions are loaded."""
        if not _NAME.fullmatch(name):
            rule = "lower-case letters, digits and -, beginning with a letter, at most 63 long"
            raise NameInvalid(kind="key", name=name, rule=rule)
        key = public_key_at(source)
        path = self.folder / f"{name}{_SUFFIX}"
        if path.exists():
            raise SigningKeyUnfit(path=path, reason="is there already; remove that key first")
        make_private(self.folder)
        write_whole(path, public_pem(key))
        return TrustedKey(name=name, path=path, key=key)

    def remove(self, name: str) -> None:
        """Trusts a key no longer. Without any key no version is loaded."""
        path = self.folder / f"{name}{_SUFFIX}"
        if not _NAME.fullmatch(name) or not path.exists():
            reason = "there is no such trusted key; `serin trust list` shows them"
            raise SigningKeyUnfit(path=path, reason=reason)
        path.unlink()

    def end(self) -> None:
        """Asks for no signatures any more."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def check(self, store: Store, bundle: Bundle) -> TrustedKey | None:
        """Returns the trusted key that has signed the version; BundleUntrusted when none has. None: signatures are not
        asked for."""
        if not self.is_required:
            return None
        known = {each.fingerprint: each for each in self.keys() if each.fingerprint and each.key}
        signatures = signatures_of(store, bundle)
        keys = {name: each.key for name, each in known.items() if each.key}
        found = signer(bundle, signatures or (), keys)
        if found is not None:
            return known[found]
        reason = why_untrusted(signatures, keys)
        raise BundleUntrusted(release=bundle.release.name, reason=reason)


def find_trusted(store: Store, model: str, version: int | str) -> Bundle:
    """Returns a version that may be computed with. BundleUntrusted when signatures are required and no trusted key has
    signed it."""
    bundle = store.bundle(model, version)
    Trust.open().check(store, bundle)
    return bundle
