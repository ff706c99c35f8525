"""Login with an OpenID Connect provider: authorization code with PKCE, state and nonce; the ID token is verified."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
import jwt

from serin.host.console import OidcSettings
from serin.machine.audit import one_line

# Those of signatures by the provider's key.
_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
_LEEWAY_S: Final = 60
_TIMEOUT_S: Final = 10.0
_DISCOVERED_S: Final = 3600.0
_NAMES: Final = ("email", "preferred_username", "name", "sub")

_discovered: dict[str, tuple[float, dict[str, Any]]] = {}


class LoginRefused(Exception):
    """A login that the provider or its answer does not allow; the text is for the person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A login that was begun: `url` is where the browser is sent."""

    url: str
    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """`groups`: those with a role. `subject`: what the provider calls the person; it never names another one."""

    who: str
    subject: str
    groups: tuple[str, ...]


def begin(settings: OidcSettings, callback: str) -> Begun:
    """Returns a new login with random state, nonce and verifier. Raises LoginRefused when the provider is not there."""
    state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    asked = {
        "response_type": "code",
        "client_id": settings.client_id,
        "redirect_uri": callback,
        "scope": " ".join(dict.fromkeys(("openid", *settings.scopes))),
        "state": state,
        "nonce": nonce,
        "code_challenge": challenge,
        "code_challenge_method": "S256",
    }
    endpoint = _discover(settings)["authorization_endpoint"]
    joined = "&" if "?" in endpoint else "?"
    return Begun(url=f"{endpoint}{joined}{urlencode(asked)}", state=state, nonce=nonce, verifier=verifier)


def finish(settings: OidcSettings, begun: Begun, code: str, callback: str) -> Person:
    """Exchanges the code for an ID token, verifies it, and returns the person with the groups of their claim that have
    a role. Raises LoginRefused when none has."""
    claims = _verified(settings, _exchange(settings, begun, code, callback))
    if not hmac.compare_digest(str(claims.get("nonce", "")), begun.nonce):
        raise LoginRefused("the provider's answer belongs to another login")
    names = (name for name in _NAMES if name != "email" or claims.get("email_verified") is not False)
    who = one_line(next(str(claims[name]) for name in names if claims.get(name))[:120])
    groups = settings.known(_groups(settings, claims))
    if not groups:
        raise LoginRefused(f"{who} is known to the provider, but has no role here (claim {settings.claim!r})")
    return Person(
        who=f"{who} ({', '.join(groups)})", subject=one_line(str(claims["sub"])[:255]), groups=groups
    )


def _groups(settings: OidcSettings, claims: Mapping[str, Any]) -> list[str]:
    """Returns the claim's texts: it is one, or a list of them. Anything else names no group."""
    given = claims.get(settings.claim)
    listed = given if isinstance(given, list) else [given]
    return [each for each in listed if isinstance(each, str)]


def _exchange(settings: OidcSettings, begun: Begun, code: str, callback: str) -> str:
    found = _discover(settings)
    body = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": callback,
        "client_id": settings.client_id,
        "code_verifier": begun.verifier,
    }
    basic: tuple[str, str] | None = None
    if settings.client_secret_file is not None:
        secret = settings.client_secret_file.read_text(encoding="utf-8").strip()
        methods = found.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        if "client_secret_basic" in methods:
            basic = quote(settings.client_id, safe=""), quote(secret, safe="")
        else:
            body["client_secret"] = secret
    answer = _ask("POST", found["token_endpoint"], data=body, basic=basic)
    if not isinstance(answer.get("id_token"), str):
        raise LoginRefused("the provider sent no ID token; is the scope `openid` allowed for this client?")
    return str(answer["id_token"])


def _verified(settings: OidcSettings, token: str) -> dict[str, Any]:
    found = _discover(settings)
    try:
        header = jwt.get_unverified_header(token)
        keys = jwt.PyJWKSet.from_dict(_ask("GET", found["jwks_uri"])).keys
        usable = [key for key in keys if header.get("kid") in (None, key.key_id)]
        if len(usable) != 1:
            raise LoginRefused("the provider signed its answer with a key that it does not publish")
        claims: dict[str, Any] = jwt.decode(
            token,
            usable[0],
            algorithms=list(_ALGORITHMS),
            audience=settings.client_id,
            issuer=found["issuer"],
            leeway=_LEEWAY_S,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
    except jwt.PyJWTError as error:
        raise LoginRefused(f"the provider's answer cannot be trusted: {error}") from error
    if claims.get("azp", settings.client_id) != settings.client_id:
        raise LoginRefused("the provider's answer is for another client")
    return claims


def _discover(settings: OidcSettings) -> dict[str, Any]:
    """Returns the provider's own description, which is read once an hour."""
    known = _discovered.get(settings.issuer)
    if known and known[0] > time.monotonic():
        return known[1]
    found = _ask("GET", f"{settings.issuer}/.well-known/openid-configuration")
    if str(found.get("issuer", "")).rstrip("/") != settings.issuer:
        raise LoginRefused(f"{settings.issuer} calls itself {found.get('issuer')!r}; set `issuer` to that")
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        if not isinstance(found.get(name), str):
            raise LoginRefused(f"{settings.issuer} names no {name}")
    _discovered[settings.issuer] = time.monotonic() + _DISCOVERED_S, found
    return found


def _ask(
    method: str, url: str, *, data: dict[str, str] | None = None, basic: tuple[str, str] | None = None
) -> dict[str, Any]:
    try:
        answer = httpx.request(method, url, data=data, auth=basic, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return dict(answer.json())
    except httpx.HTTPStatusError as error:
        raise LoginRefused(
            f"the provider answered {error.response.status_code} at {error.request.url.path}"
        ) from error
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise LoginRefused(f"the provider cannot be asked: {type(error).__name__}") from error
