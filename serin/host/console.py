"""The console of a stack as the host sees it: its settings (a YAML file that SERIN_CONSOLE names), where it answers,
and its secrets."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import logging
import secrets
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from serin.errors import SpecError, nearest
from serin.machine import environment
from serin.machine.durable import file_signature, make_private, own_secret, write_secret
from serin.machine.ports import Claims, choose_port, is_loopback
from serin.spec.roles import Access, Grant, Role
from serin.spec.section import Duration, Section
from serin.spec.yaml_file import read_mapping

LOOPBACK = "127.0.0.1"
NOT_INSTALLED = (
    "the console is not installed here; to get it: pip install 'serin[console]', then `serin up` again"
)

_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)
_PORTS = (8090, 8091, 8092)
_NEEDED = ("starlette", "uvicorn", "jinja2", "jwt")
Account = Literal["viewer", "operator"]
"""Who logs in with a generated secret."""
ACCOUNTS: tuple[Account, ...] = get_args(Account)
ACCOUNT_ROLES: dict[Account, Role] = {"viewer": "view", "operator": "administer"}
"""Their roles, for all models."""

_SIGNING = "session-key"

log = logging.getLogger(__name__)


class OidcSettings(Section):
    """Login with an OpenID Connect provider: authorization code with PKCE."""

    issuer: str
    """The provider's issuer URL; its discovery document is at /.well-known/openid-configuration below it."""
    client_id: str
    """The name under which the console is registered with the provider."""
    client_secret_file: Path | None = None
    """A file with the client's secret. By default the console is a public client."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    """What is asked of the provider."""
    claim: str = "groups"
    """The claim of the ID token that names the groups of a person: a text or a list of texts."""
    groups: Mapping[str, tuple[Grant, ...]] = Field(min_length=1)
    """For each group, roles for models. The roles of several groups add up."""

    def known(self, groups: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the groups that have a role."""
        return tuple(each for each in dict.fromkeys(groups) if self.groups.get(each))

    def access(self, groups: Iterable[str]) -> Access:
        return Access(frozenset(grant for each in groups for grant in self.groups.get(each, ())))

    @field_validator("issuer")
    @classmethod
    def _is_safe(cls, issuer: str) -> str:
        place = urlsplit(issuer)
        if place.scheme == "https" or (place.scheme == "http" and place.hostname in (LOOPBACK, "localhost")):
            return issuer.rstrip("/")
        raise ValueError(f"{issuer!r} must be an https URL, or an http URL on this machine")


class ConsoleSettings(Section):
    """Where the console listens and who may log in."""

    address: str = LOOPBACK
    """The address on which the console listens."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The console's port. By default a free one, 8090 first."""
    url: str | None = None
    """The address that people use when it is not that of the port, such as https://serin.example.com behind an
    ingress. Required by `oidc`."""
    session: Duration = Field(default=43_200.0, ge=60, le=30 * 86_400)
    """How long a login lasts."""
    secrets: bool = True
    """Whether the two generated secrets are accepted. Set it to false when only `oidc` should be."""
    oidc: OidcSettings | None = None
    """Login with an OpenID Connect provider."""

    @field_validator("url")
    @classmethod
    def _is_an_origin(cls, url: str | None) -> str | None:
        if url is None:
            return None
        place = urlsplit(url)
        if place.scheme in ("http", "https") and place.netloc and place.path in ("", "/") and not place.query:
            return f"{place.scheme}://{place.netloc}"
        raise ValueError(f"{url!r} must be a scheme and a host, such as https://serin.example.com")


def read_settings() -> ConsoleSettings:
    """Returns the settings of the file that SERIN_CONSOLE names. Raises SpecError for one that cannot be used."""
    path = environment.path("SERIN_CONSOLE")
    if path is None:
        return ConsoleSettings()
    where = f"{path} (the console's settings, SERIN_CONSOLE)"
    if not path.is_file():
        raise SpecError(
            where=where, problems=[("", "there is no such file; correct SERIN_CONSOLE or unset it")]
        )
    try:
        found = ConsoleSettings.model_validate(dict(read_mapping(path)))
    except ValidationError as error:
        problems = [(".".join(map(str, item["loc"])), _sentence(item)) for item in error.errors()]
        raise SpecError(where=where, problems=problems) from error
    if found.oidc is not None and found.url is None:
        problem = "is missing: the provider sends people back to this address after the login"
        raise SpecError(where=where, problems=[("url", problem)])
    if not is_loopback(found.address) and not (found.url or "").startswith("https://"):
        problem = (
            f"with address {found.address} other machines reach the console: name the https address of the proxy "
            "in front of it; or leave `address` out, and `serin up --address` offers it with the gateway's TLS"
        )
        raise SpecError(where=where, problems=[("url", problem)])
    if found.oidc is None and not found.secrets:
        raise SpecError(
            where=where, problems=[("secrets", "without them and without oidc nobody can log in")]
        )
    return found


class FollowedSettings:
    """The settings of the file, read again when it has changed: a group that loses its role loses it at the next
    request. While a changed file cannot be used, the settings before it hold."""

    def __init__(self) -> None:
        self._signature = self._sign()
        self._settings = read_settings()

    def __call__(self) -> ConsoleSettings:
        signature = self._sign()
        if signature != self._signature:
            self._signature = signature
            try:
                self._settings = read_settings()
            except SpecError as error:
                log.warning("the settings before this change hold: %s", error)
        return self._settings

    def _sign(self) -> tuple[int, ...] | None:
        path = environment.path("SERIN_CONSOLE")
        return None if path is None else file_signature(path)


def _sentence(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing; add it"
    if item["type"] == "extra_forbidden":
        sections: dict[object, type[Section]] = {"oidc": OidcSettings}
        section = Grant if "groups" in item["loc"][1:-1] else sections.get(item["loc"][0], ConsoleSettings)
        return f"unknown key{nearest(str(item['loc'][-1]), list(section.model_fields))}"
    return item["msg"].removeprefix("Value error, ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolePlace:
    """`url`: the address for people; `port`: where the process listens."""

    url: str
    port: int


def is_installed() -> bool:
    return all(importlib.util.find_spec(package) is not None for package in _NEEDED)


def choose_place(settings: ConsoleSettings, claims: Claims, *, last: int | None) -> ConsolePlace:
    """Returns the place that the settings name; a free port is that of the last stack if possible."""
    port = choose_port(
        claims,
        asked=settings.port,
        option="`port` in the file of SERIN_CONSOLE",
        preferred=(*((last,) if last else ()), *_PORTS),
    )
    return ConsolePlace(url=settings.url or f"http://{LOOPBACK}:{port}", port=port)


def answers(address: str, port: int, *, seconds: float = 2.0) -> bool:
    """Returns whether the console that listens there answers."""
    host = LOOPBACK if address in _EVERY_ADDRESS else address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=seconds):
            return True
    except OSError:
        return False


# They are on no command line, in no URL and in no log. Changing a secret ends the logins with it.
def secret_file(home: Path, account: Account) -> Path:
    return _folder(home) / f"{account}-secret"


def account_secret(home: Path, account: Account) -> str:
    """Returns the secret of an account and creates it if needed; two concurrent calls get the same."""
    return own_secret(secret_file(home, account))


def rotate_secret(home: Path, account: Account) -> str:
    """Replaces the secret of an account. Everyone who logged in with the old one must log in again."""
    make_private(_folder(home))
    write_secret(secret_file(home, account), f"{secrets.token_urlsafe(32)}\n")
    return account_secret(home, account)


def signing_key(home: Path, login: Account | Literal["oidc"]) -> bytes:
    """Returns the key that signs the sessions of a kind of login: it changes with the account's secret, that of a
    provider's people with the operator's."""
    key, account = own_secret(_folder(home) / _SIGNING), "operator" if login == "oidc" else login
    return hmac.digest(key.encode(), f"{login}:{account_secret(home, account)}".encode(), hashlib.sha256)


def matching_account(home: Path, given: str) -> Account | None:
    """Returns the account whose secret was given. Takes the same time for every answer."""
    found: Account | None = None
    for account in ACCOUNTS:
        if hmac.compare_digest(account_secret(home, account).encode(), given.encode()):
            found = account
    return found


def _folder(home: Path) -> Path:
    return home / "console"
