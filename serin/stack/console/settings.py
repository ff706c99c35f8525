"""The settings of the console: a YAML file that SERIN_CONSOLE names. Without one the defaults apply."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from serin.errors import SpecError, nearest
from serin.machine import environment
from serin.spec.section import Duration, Section
from serin.spec.yaml_file import read_mapping

LOOPBACK = "127.0.0.1"


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
    """The claim of the ID token that decides the role: a text or a list of texts."""
    viewers: tuple[str, ...] = ()
    """Values of the claim that make a viewer."""
    operators: tuple[str, ...] = ()
    """Values of the claim that make an operator."""

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
    path = environment.console_file()
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
    if not _is_loopback(found.address) and not (found.url or "").startswith("https://"):
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


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _sentence(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing; add it"
    if item["type"] == "extra_forbidden":
        section = OidcSettings if item["loc"][0] == "oidc" else ConsoleSettings
        return f"unknown key{nearest(str(item['loc'][-1]), list(section.model_fields))}"
    return item["msg"].removeprefix("Value error, ")
