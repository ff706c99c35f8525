"""The receivers of alerts: a name and a URL each, in one file that only its owner can read. A URL is a secret."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from serin.errors import ReceiverRefused
from serin.machine.durable import make_private, write_secret
from serin.machine.locks import locked

_WEBHOOK: Final = ("http", "https")
_RESERVED: Final = ("log", "prefect")
_NAME_RULE: Final = (
    "a name is made of lower-case letters, digits and -, begins with a letter, at most 63 long"
)


class Receiver(BaseModel):
    """An http or https URL is a webhook; every other one belongs to apprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
    url: SecretStr

    @property
    def is_webhook(self) -> bool:
        return self._parts.scheme in _WEBHOOK

    @property
    def shown(self) -> str:
        """The URL without its secrets: apprise also puts tokens where the host is."""
        if not self.is_webhook:
            return f"{self._parts.scheme}://..."
        port = "" if self._parts.port is None else f":{self._parts.port}"
        return f"{self._parts.scheme}://{self._parts.hostname}{port}/..."

    @property
    def _parts(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.url.get_secret_value())


class _Receivers(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["serin.receivers"] = "serin.receivers"
    version: Literal[1] = 1
    receivers: tuple[Receiver, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiverFile:
    """The receivers of `home`. Changes are atomic and serialised."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / "alerts" / "receivers.json"

    def read(self) -> tuple[Receiver, ...]:
        """Raises ReceiverRefused when the file cannot be used."""
        try:
            return _Receivers.model_validate_json(self.path.read_bytes()).receivers
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError) as error:
            reason = (
                f"{self.path} cannot be used ({type(error).__name__}); remove it and add the receivers again"
            )
            raise ReceiverRefused(name="*", reason=reason) from None

    def add(self, name: str, url: str) -> Receiver:
        receiver = valid_receiver(name, url)
        with self._changing() as before:
            if any(each.name == name for each in before):
                raise ReceiverRefused(name=name, reason="there is one of this name; remove it first")
            self._write((*before, receiver))
        return receiver

    def remove(self, name: str) -> None:
        with self._changing() as before:
            after = tuple(each for each in before if each.name != name)
            if after == before:
                reason = "there is no such receiver; `serin alerts receivers list` shows them"
                raise ReceiverRefused(name=name, reason=reason)
            self._write(after)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tuple[Receiver, ...]]:
        make_private(self.path.parent)
        with locked(self.path.with_name(".receivers.lock"), mode=0o600):
            yield self.read()

    def _write(self, receivers: tuple[Receiver, ...]) -> None:
        plain = [{"name": each.name, "url": each.url.get_secret_value()} for each in receivers]
        content = {"format": "serin.receivers", "version": 1, "receivers": plain}
        write_secret(self.path, json.dumps(content, indent=2) + "\n")


def valid_receiver(name: str, url: str) -> Receiver:
    """Raises ReceiverRefused for a name or URL that cannot be used, without showing the URL."""
    url = url.strip()
    if name in _RESERVED:
        raise ReceiverRefused(name=name, reason="this name is taken by a built-in receiver; choose another")
    try:
        receiver = Receiver(name=name, url=SecretStr(url))
    except ValidationError:
        raise ReceiverRefused(name=name, reason=_NAME_RULE) from None
    try:
        parts = urllib.parse.urlsplit(url)
        usable = bool(parts.scheme) and (parts.scheme not in _WEBHOOK or bool(parts.hostname))
        _ = parts.port
    except ValueError:
        usable = False
    if not usable or any(letter.isspace() for letter in url):
        reason = (
            "this is not a URL; give https://... for a webhook, or a URL of apprise such as mailtos://..."
        )
        raise ReceiverRefused(name=name, reason=reason)
    return receiver
