"""Signatures of model versions: ed25519 over the manifest's bytes, which hold the digest of every file.

They are kept in the store beside the version, not in it: a published version never changes. OpenSSL makes and checks
the same signatures.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from serin.errors import SigningKeyUnfit
from serin.formats.bundle import MANIFEST
from serin.machine import environment
from serin.machine.durable import create_secret
from serin.store.artifacts import Bundle
from serin.store.store import Store

FORMAT, VERSION = "serin.signature", 1
_HEX = {"key": re.compile(r"[0-9a-f]{64}"), "signature": re.compile(r"[0-9a-f]{128}")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`key`: the fingerprint of the public key. Both are lower-case hexadecimal."""

    key: str
    signature: str


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


def public_pem(key: Ed25519PublicKey) -> str:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def sign_version(store: Store, model: str, version: int, folder: Path, key: Ed25519PrivateKey) -> str:
    """Signs the version whose files are in `folder`, which may be published later. Signatures of other keys stay.
    Returns the key's fingerprint."""
    name = fingerprint(key.public_key())
    made = Signature(key=name, signature=key.sign((folder / MANIFEST).read_bytes()).hex())

    def added(content: bytes | None) -> bytes:
        others = () if content is None else read_signatures(content) or ()
        return _document([*(each for each in others if each.key != name), made])

    store.change_signatures(model, version, added)
    return name


def sign_if_configured(store: Store, model: str, version: int, folder: Path) -> None:
    """Signs a version before it is published, where SERIN_SIGNING_KEY names a key."""
    path = environment.signing_key()
    if path is not None:
        sign_version(store, model, version, folder, read_private_key(path))


def signatures_of(store: Store, bundle: Bundle) -> tuple[Signature, ...] | None:
    """Returns the signatures; none when there are none; None when their file cannot be read."""
    content = store.signatures(bundle.model, bundle.version)
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


def read_signatures(content: bytes) -> tuple[Signature, ...] | None:
    """Reads a file of signatures. None when it is not exactly as it was written."""
    try:
        document = json.loads(content)
        found = tuple(Signature(**entry) for entry in document["signatures"])
        plain = all(_HEX[name].fullmatch(getattr(each, name)) for each in found for name in _HEX)
    except (ValueError, KeyError, TypeError):
        return None
    return found if plain and _document(found) == content else None


def _document(signatures: tuple[Signature, ...] | list[Signature]) -> bytes:
    entries = [{"key": each.key, "signature": each.signature} for each in signatures]
    document = {"format": FORMAT, "version": VERSION, "signatures": entries}
    return (json.dumps(document, indent=1) + "\n").encode()
