"""API keys: who may call which model, until when. One file that only its owner reads, with hashes instead of keys.

A key is 256 random bits, so that its plain SHA-256 reveals nothing; it is shown once, when it is created.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serin.errors import IssuerRefused, KeyFileBroken, KeyRefused
from serin.machine.durable import file_signature, make_private, sync, write_secret
from serin.machine.locks import locked
from serin.serving.envoy.guard import asks_for_keys
from serin.serving.envoy.issuers import Issuer, Name, lua_issuers
from serin.spec.rate import Rate, RateText, read_rate
from serin.spec.roles import ROLES, Pattern, Role

PREFIX = "serin_"  # so that scanners for leaked secrets know one

KeyState = Literal["good", "expired", "revoked"]
_NAME = "lower-case letters, digits and -, begins with a letter, at most 63 long"
_RULES = {
    "name": f"a name is made of {_NAME}",
    "models": f"a model's name is made of {_NAME}; `fraud-*` stands for all that begin so, and `*` for all models",
    "role": f"a role is one of {', '.join(ROLES)}",
}


class ApiKey(BaseModel):
    """The stored part of a key. `models` None: all of them. `role`: at the console; None: the key asks for answers
    only. `rate` None: no limit. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    models: tuple[Pattern, ...] | None
    role: Role | None = None
    made: float
    expires: float | None = None
    revoked: float | None = None
    rate: RateText | None = None
    burst: int | None = Field(default=None, ge=1)

    @property
    def limit(self) -> Rate | None:
        return read_rate(self.rate, self.burst) if self.rate else None

    def state(self, now: float) -> KeyState:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "good"


class KeyRing(BaseModel):
    """All keys, and the issuers of tokens. `required` False: the gateway answers everybody, as it does when there is no
    file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["serin.keys"] = "serin.keys"
    version: Literal[1] = 1
    required: bool = False
    keys: tuple[ApiKey, ...] = ()
    issuers: tuple[Issuer, ...] = ()

    def find(self, key: str) -> ApiKey | None:
        """Returns the entry of a key, whatever its state."""
        digest = _digest(key)
        return next((entry for entry in self.keys if entry.sha256 == digest), None)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """The ring at `path`. Changes are atomic and serialised.

    That keys are required is also recorded in a second file beside it, and in the gateway's last documents
    (`published`): a ring that is lost or broken closes the gateway. Only `require(False)` stops requiring keys.
    """

    path: Path
    published: Path | None = None

    def read(self) -> KeyRing:
        """Returns an empty ring where keys were never required; raises KeyFileBroken when the file is lost or cannot be
        trusted."""
        ring = self._read()
        if ring is not None:
            return ring
        if self._asked_before():
            raise KeyFileBroken(path=self.path, reason="is lost, and keys are required")
        return KeyRing()

    def _read(self) -> KeyRing | None:
        try:
            ring = KeyRing.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (PermissionError, IsADirectoryError) as error:
            raise KeyFileBroken(path=self.path, reason=f"cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            reason = f"is not a file of API keys ({where}: {first['msg']})"
            raise KeyFileBroken(path=self.path, reason=reason) from error
        return ring.model_copy(update={"required": ring.required or self._mark_signature() is not None})

    @property
    def mark(self) -> Path:
        """The file that records that keys are required, even if the ring is lost."""
        return self.path.with_name(".keys-required")

    def remember(self, ring: KeyRing) -> None:
        """Records that keys are required; call it with the lock held. A ring from a backup has no mark yet."""
        if ring.required and self._mark_signature() is None:
            write_secret(self.mark, "keys are required; `serin keys require --off` ends it\n")

    def _mark_signature(self) -> tuple[int, ...] | None:
        return file_signature(self.mark)

    def _asked_before(self) -> bool:
        if self._mark_signature() is not None:
            return True
        try:
            return self.published is not None and asks_for_keys(self.published.read_bytes())
        except FileNotFoundError:
            return False
        except (PermissionError, IsADirectoryError):
            return True  # perhaps

    def create(
        self,
        name: str,
        *,
        models: Sequence[str] | None = None,
        role: str | None = None,
        lasts_s: float | None = None,
        rate: str | None = None,
        burst: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Returns a new key and its secret, which is stored nowhere. From the first one on, the gateway requires a
        key."""
        now = time.time()
        try:
            limit = read_rate(rate, burst) if rate else None
        except ValueError as error:
            raise KeyRefused(name=name, reason=str(error)) from error
        if burst is not None and limit is None:
            raise KeyRefused(name=name, reason="a burst needs a rate, such as 100/s")
        if models is not None and not models:
            raise KeyRefused(name=name, reason="it would be for no model; name one, or leave it out for all")
        key = PREFIX + secrets.token_urlsafe(32)
        with self._changing(even_lost=True) as ring:
            if any(entry.name == name for entry in ring.keys):
                raise KeyRefused(name=name, reason="there is or was one of this name; choose another")
            try:
                entry = ApiKey.model_validate(
                    {
                        "name": name,
                        "sha256": _digest(key),
                        "models": tuple(dict.fromkeys(models)) if models is not None else None,
                        "role": role,
                        "made": now,
                        "expires": None if lasts_s is None else now + lasts_s,
                        "rate": rate,
                        "burst": burst,
                    }
                )
            except ValidationError as error:
                raise KeyRefused(name=name, reason=_RULES[str(error.errors()[0]["loc"][0])]) from None
            self._write(ring.model_copy(update={"required": True, "keys": (*ring.keys, entry)}))
        return entry, key

    def revoke(self, name: str) -> ApiKey:
        """Revokes a key. The entry stays, with the time. Revoking the last key does not open the gateway."""
        with self._changing() as ring:
            found = [entry for entry in ring.keys if entry.name == name]
            if not found:
                raise KeyRefused(name=name, reason="there is no such key; `serin keys list` shows them")
            if found[0].revoked is not None:
                return found[0]
            gone = found[0].model_copy(update={"revoked": time.time()})
            keys = tuple(gone if entry is found[0] else entry for entry in ring.keys)
            self._write(ring.model_copy(update={"keys": keys}))
        return gone

    def add_issuer(self, issuer: Issuer) -> None:
        """Takes the issuer's tokens from now on. From the first one on, the gateway requires a key or a token."""
        with self._changing(even_lost=True) as ring:
            if any(entry.name == issuer.name for entry in ring.issuers):
                raise IssuerRefused(name=issuer.name, reason="there is one of this name; remove it first")
            if any(entry.url == issuer.url for entry in ring.issuers):
                raise IssuerRefused(
                    name=issuer.name, reason=f"{issuer.url} has been added under another name"
                )
            self._write(ring.model_copy(update={"required": True, "issuers": (*ring.issuers, issuer)}))

    def remove_issuer(self, name: str) -> Issuer:
        """Refuses the issuer's tokens from now on. Removing the last one does not open the gateway."""
        with self._changing() as ring:
            found = [entry for entry in ring.issuers if entry.name == name]
            if not found:
                reason = "there is no such issuer; `serin keys issuer list` shows them"
                raise IssuerRefused(name=name, reason=reason)
            rest = tuple(entry for entry in ring.issuers if entry.name != name)
            self._write(ring.model_copy(update={"issuers": rest}))
        return found[0]

    def require(self, required: bool) -> None:
        with self._changing(even_lost=True) as ring:
            self._write(ring.model_copy(update={"required": required}))
            if not required:
                self._forget_mark()

    def take(self, ring: KeyRing, content: bytes) -> None:
        """Replaces the file by another host's, which holds `ring`; call it with the lock held. Keys that are not
        required any more there are not required here."""
        self.remember(ring)
        write_secret(self.path, content.decode())
        if not ring.required:
            self._forget_mark()

    def _forget_mark(self) -> None:
        """Stops requiring keys. Call it last: an interruption before this still requires them."""
        self.mark.unlink(missing_ok=True)
        sync(self.path.parent)

    def signature(self) -> tuple[object, ...]:
        """Returns a value that changes with every change, also of what was published."""
        published = file_signature(self.published) if self.published else None
        return file_signature(self.path), self._mark_signature(), published

    @contextlib.contextmanager
    def _changing(self, *, even_lost: bool = False) -> Iterator[KeyRing]:
        """Yields the ring for a change. `even_lost`: a lost one is started again; a broken one is left unchanged."""
        with self.locked():
            yield (self._read() or KeyRing(required=self._asked_before())) if even_lost else self.read()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Prevents other processes from changing or publishing the ring in the meantime."""
        make_private(self.path.parent)
        with locked(self.path.with_name(f".{self.path.name}.lock"), mode=0o600):
            yield

    def _write(self, ring: KeyRing) -> None:
        self.remember(ring)
        write_secret(self.path, json.dumps(ring.model_dump(mode="json"), indent=1) + "\n")


# What keys.lua reads instead of a ring that is lost or broken: it lets nobody in, and answers 503 to those with a key.
CLOSED = (
    'local KEYS = setmetatable({}, {__index = function() error("the file of API keys is lost or broken") end})\n'
    "local ISSUERS = {}\n"
)


def lua_table(ring: KeyRing) -> str:
    """Returns the ring as keys.lua reads it. Every value has been validated: none can end its quotes."""
    lines = []
    for entry in ring.keys:
        if entry.revoked is not None:
            continue
        fields: dict[str, Any] = {"name": f'"{entry.name}"'}
        if entry.expires is not None:
            fields["till"] = f"{entry.expires:.0f}"
        if entry.models is not None:
            fields["models"] = f'",{",".join(entry.models)},"'
        if entry.limit is not None:
            fields["wait"] = f'"{entry.limit.wait_s}"'
        inside = ", ".join(f"{name} = {value}" for name, value in fields.items())
        lines.append(f'  ["{entry.sha256}"] = {{{inside}}},')
    return "\n".join(["local KEYS = {", *lines, "}", lua_issuers(ring.issuers)])
