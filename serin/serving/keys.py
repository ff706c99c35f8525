"""API keys: who may ask for which model, until when. One file that only its owner reads, with hashes instead of keys.

A key is 256 random bits, so that a plain SHA-256 of it tells nobody anything; it is shown once, when it is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serin.durable import write_secret
from serin.errors import KeyFileBroken, KeyRefused
from serin.spec.names import valid_model_name

PREFIX = "serin_"  # so that scanners for leaked secrets know one

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
KeyState = Literal["good", "expired", "revoked"]


class ApiKey(BaseModel):
    """What is kept of a key. `models` None: all of them. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    models: tuple[Name, ...] | None
    made: float
    expires: float | None = None
    revoked: float | None = None

    def state(self, now: float) -> KeyState:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "good"


class KeyRing(BaseModel):
    """All keys. `required` False: the gateway answers everybody, as it does when there is no file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["serin.keys"] = "serin.keys"
    version: Literal[1] = 1
    required: bool = False
    keys: tuple[ApiKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """The ring at `path`. Changes are whole or not made, and made one after another."""

    path: Path

    def read(self) -> KeyRing:
        """An empty ring when there is no file; KeyFileBroken when there is one that cannot be trusted."""
        try:
            return KeyRing.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return KeyRing()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise KeyFileBroken(path=self.path, reason=f"{where}: {first['msg']}") from error

    def create(
        self, name: str, *, models: Sequence[str] | None = None, lasts_s: float | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is kept nowhere. From the first one on, the gateway asks for a key."""
        now = time.time()
        key = PREFIX + secrets.token_urlsafe(32)
        with self.changing() as ring:
            if any(entry.name == name for entry in ring.keys):
                raise KeyRefused(name=name, reason="there is or was one of this name; choose another")
            try:
                entry = ApiKey(
                    name=name,
                    sha256=hashlib.sha256(key.encode()).hexdigest(),
                    models=tuple(dict.fromkeys(map(valid_model_name, models))) if models else None,
                    made=now,
                    expires=None if lasts_s is None else now + lasts_s,
                )
            except ValidationError:
                reason = "a name is made of lower-case letters, digits and -, begins with a letter, at most 63 long"
                raise KeyRefused(name=name, reason=reason) from None
            self._write(ring.model_copy(update={"required": True, "keys": (*ring.keys, entry)}))
        return entry, key

    def revoke(self, name: str) -> ApiKey:
        """It opens nothing any more. The entry stays, with the time. Revoking the last key opens nothing either."""
        with self.changing() as ring:
            found = [entry for entry in ring.keys if entry.name == name]
            if not found:
                raise KeyRefused(name=name, reason="there is no such key; `serin keys list` shows them")
            if found[0].revoked is not None:
                return found[0]
            gone = found[0].model_copy(update={"revoked": time.time()})
            keys = tuple(gone if entry is found[0] else entry for entry in ring.keys)
            self._write(ring.model_copy(update={"keys": keys}))
        return gone

    def require(self, required: bool) -> None:
        with self.changing() as ring:
            self._write(ring.model_copy(update={"required": required}))

    def signature(self) -> tuple[int, ...] | None:
        """Another one after every change."""
        return file_signature(self.path)

    @contextlib.contextmanager
    def changing(self) -> Iterator[KeyRing]:
        """The ring as it is, and nobody else changes or publishes it meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(lock)

    def _write(self, ring: KeyRing) -> None:
        write_secret(self.path, json.dumps(ring.model_dump(mode="json"), indent=1) + "\n")


def lua_table(ring: KeyRing) -> str:
    """The ring as keys.lua reads it. Every value has been validated: none can end its quotes."""
    lines = []
    for entry in ring.keys:
        if entry.revoked is not None:
            continue
        fields: dict[str, Any] = {}
        if entry.expires is not None:
            fields["till"] = f"{entry.expires:.0f}"
        if entry.models is not None:
            fields["models"] = f'",{",".join(entry.models)},"'
        inside = ", ".join(f"{name} = {value}" for name, value in fields.items())
        lines.append(f'  ["{entry.sha256}"] = {{{inside}}},')
    return "\n".join(["local KEYS = {", *lines, "}", ""])


def file_signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
