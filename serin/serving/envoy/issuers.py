"""Issuers of tokens: which OpenID provider's JWTs the gateway takes, for whom and for which models. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from serin.machine.ports import is_loopback
from serin.spec.rate import Rate, RateText, read_rate
from serin.spec.roles import Pattern

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
# Nothing in a claim's name can end the quotes of a Lua string.
Claim = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]

SKEW_S = 60  # that the clocks of provider and gateway may differ
_TOKENS_KEPT = 500  # verified tokens that Envoy remembers for each issuer and thread
_LONGEST_TOKEN = 4096  # of a remembered one


def safe_url(url: str) -> str:
    """Returns the URL when what it answers can be trusted: by https, or from this machine. Else ValueError."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError(f"{parts.hostname}: a URL must not hold a password")
    if parts.scheme == "https" and parts.hostname:
        return url
    if parts.scheme == "http" and parts.hostname and is_loopback(parts.hostname):
        return url
    raise ValueError(f"{url!r} is not an https URL (http is possible for this machine's own addresses only)")


class Issuer(BaseModel):
    """A provider whose tokens are taken. Its public keys are found by discovery below `url` (its `iss`), at `jwks_url`,
    or in the file `jwks_file`.

    A token may call `models`, or those that its claim `models_claim` names; without either, every model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    url: str = Field(min_length=1, max_length=500)
    audiences: tuple[Annotated[str, Field(min_length=1, max_length=500)], ...] = Field(min_length=1)
    jwks_url: Annotated[str, AfterValidator(safe_url)] | None = None
    jwks_file: str | None = None
    models: tuple[Pattern, ...] | None = None
    models_claim: Claim | None = None
    rate: RateText | None = None
    burst: int | None = Field(default=None, ge=1)
    added: float

    @model_validator(mode="after")
    def _is_one_of_each(self) -> Self:
        if self.jwks_url and self.jwks_file:
            raise ValueError("name a URL of keys or a file of keys, not both")
        if self.models is not None and self.models_claim is not None:
            raise ValueError("name the models or the claim that names them, not both")
        if not self.jwks_url and not self.jwks_file:
            safe_url(self.url)
        return self

    @property
    def limit(self) -> Rate | None:
        """For each subject."""
        return read_rate(self.rate, self.burst) if self.rate else None

    @property
    def is_remote(self) -> bool:
        return self.jwks_file is None


def provider(issuer: Issuer, jwks: str) -> dict[str, Any]:
    """Returns the issuer as Envoy's jwt_authn verifies it. `jwks`: its public keys, as JSON."""
    return {
        "issuer": issuer.url,
        "audiences": list(issuer.audiences),
        "local_jwks": {"inline_string": jwks},
        # And not from the query, where Envoy looks by default.
        "from_headers": [{"name": "authorization", "value_prefix": word} for word in ("Bearer ", "bearer ")],
        "forward": True,  # keys.lua removes it, and refuses two of them
        "payload_in_metadata": issuer.name,
        "failed_status_in_metadata": f"{issuer.name} failed",
        "clock_skew_seconds": SKEW_S,
        "require_expiration": True,
        "jwt_cache_config": {"jwt_cache_size": _TOKENS_KEPT, "jwt_max_token_size": _LONGEST_TOKEN},
    }


def lua_issuers(issuers: tuple[Issuer, ...]) -> str:
    """Returns the table ISSUERS that keys.lua reads. Every value has been validated: none can end its quotes."""
    lines = []
    for issuer in issuers:
        fields = []
        if issuer.models is not None:
            fields.append(f'models = ",{",".join(issuer.models)},"')
        if issuer.models_claim is not None:
            fields.append(f'claim = "{issuer.models_claim}"')
        if issuer.limit is not None:
            fields.append(f'wait = "{issuer.limit.wait_s}"')
        lines.append(f'  ["{issuer.name}"] = {{{", ".join(fields)}}},')
    return "\n".join(["local ISSUERS = {", *lines, "}", ""])
