"""Trusted keys: while a stack has some, it loads only versions that one of them has signed.

They are public keys in PEM, one file each, in `trusted-keys` of the home, or in the folder that SERIN_TRUSTED_KEYS
names. The folder is what asks for signatures: when it is empty, no version is loaded.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from serin.errors import BundleUntrusted, NameInvalid, SigningKeyUnfit
from serin.formats.signature import (
    fingerprint,
    public_pem,
    read_public_key,
    signatures_of,
    signer,
)
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.private import make_private
from serin.store.artifacts import Bundle
from serin.store.store import Store

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_SUFFIX = ".pem"


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
        named = environment.trusted_keys()
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
        try:
            key = read_public_key(source.read_bytes(), source)
        except OSError as error:
            raise SigningKeyUnfit(path=source, reason=f"cannot be read ({error.strerror})") from error
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
        if signatures is None:
            reason = "its file of signatures is damaged"
        elif not signatures:
            reason = "it is not signed"
        elif not any(each.key in known for each in signatures):
            names = ", ".join(each.key[:16] for each in signatures)
            reason = f"it is signed by {names}, which is not trusted"
        else:
            reason = "its signature is not one of its manifest: version or signature was changed"
        raise BundleUntrusted(release=f"{bundle.model}-v{bundle.version}", reason=reason)


def find_trusted(store: Store, model: str, version: int | str) -> Bundle:
    """Returns a version that may be computed with. BundleUntrusted when signatures are required and no trusted key has
    signed it."""
    bundle = store.bundle(model, version)
    Trust.open().check(store, bundle)
    return bundle
