"""The public keys of issuers: fetched from their provider, checked, and kept on disk for when it does not answer.

Envoy gets the keys with its configuration and asks nobody itself: a gateway that starts while the provider is down
still knows the keys that it knew before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from serin.errors import IssuerUnusable
from serin.machine.durable import file_signature, make_private, write_secret
from serin.serving.envoy.issuers import Issuer, safe_url

log = logging.getLogger(__name__)

REFRESH_S = 60.0
_TIMEOUT_S = 5.0
_MOST_BYTES = 1 << 20
_PUBLIC = ("kty", "kid", "alg", "use", "crv", "n", "e", "x", "y")
_CURVES = {"EC": ("P-256", "P-384", "P-521"), "OKP": ("Ed25519",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys of an issuer. `fetched`: seconds since 1970; of a file, when it was changed."""

    jwks: str
    fetched: float
    count: int


class JwksFolder:
    """The keys of each issuer as they were last seen, in `folder`: one file for each provider that is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asking: threading.Thread | None = None
        self._asked: dict[str, float] = {}  # by name, monotonic
        self._failed: dict[str, str] = {}

    def known(self, issuer: Issuer) -> KnownKeys | None:
        """Returns the keys in force; None when there are none yet, or the file cannot be used."""
        path = self._path(issuer)
        try:
            jwks = _checked(issuer, path.read_bytes())
            return KnownKeys(jwks=json.dumps(jwks), fetched=path.stat().st_mtime, count=len(jwks["keys"]))
        except (OSError, IssuerUnusable):
            return None

    def signature(self, issuers: Sequence[Issuer]) -> tuple[object, ...]:
        """Returns a value that changes when the keys of any of them do."""
        return tuple(file_signature(self._path(issuer)) for issuer in issuers)

    def refresh(self, issuers: Sequence[Issuer]) -> None:
        """Asks the providers that were not asked for a minute, without waiting for their answers. A failure is logged
        once; the keys that are known stay in force."""
        now = time.monotonic()
        due = [
            each
            for each in issuers
            if each.is_remote and now >= self._asked.get(each.name, -math.inf) + REFRESH_S
        ]
        if not due or (self._asking is not None and self._asking.is_alive()):
            return
        self._asked |= {each.name: now for each in due}
        self._asking = threading.Thread(target=self._ask_all, args=(due,), name="jwks", daemon=True)
        self._asking.start()

    def fetch(self, issuer: Issuer) -> KnownKeys:
        """Returns the keys after asking the provider, or reading the file, now. IssuerUnusable says what is wrong."""
        if not issuer.is_remote:
            try:
                _checked(issuer, self._path(issuer).read_bytes())
            except OSError as error:
                raise IssuerUnusable(
                    name=issuer.name, reason=f"{error.filename}: {error.strerror}"
                ) from error
        else:
            jwks = _checked(issuer, _get(issuer, _jwks_url(issuer)))
            make_private(self.folder)
            write_secret(self._path(issuer), json.dumps(jwks, sort_keys=True))
        known = self.known(issuer)
        if known is None:
            raise IssuerUnusable(name=issuer.name, reason="its keys cannot be read")
        return known

    def forget(self, issuer: Issuer) -> None:
        if issuer.is_remote:
            self._path(issuer).unlink(missing_ok=True)

    def _ask_all(self, issuers: Sequence[Issuer]) -> None:
        for issuer in issuers:
            try:
                self.fetch(issuer)
                if self._failed.pop(issuer.name, None):
                    log.info("the provider of issuer %s answers again", issuer.name)
            except (IssuerUnusable, OSError) as error:
                if self._failed.get(issuer.name) != str(error):
                    log.warning("%s; the keys known so far stay in force", error)
                self._failed[issuer.name] = str(error)

    def _path(self, issuer: Issuer) -> Path:
        if issuer.jwks_file:
            return Path(issuer.jwks_file)
        place = hashlib.sha256(f"{issuer.url} {issuer.jwks_url}".encode()).hexdigest()[:16]
        return self.folder / f"{place}.json"


def _jwks_url(issuer: Issuer) -> str:
    """Returns where the keys are: as configured, or as the provider's discovery document says."""
    if issuer.jwks_url is not None:
        return issuer.jwks_url
    place = f"{issuer.url.rstrip('/')}/.well-known/openid-configuration"
    document = _object(issuer, _get(issuer, place))
    if document.get("issuer") != issuer.url:
        reason = f"{place} is of issuer {document.get('issuer')!r}; write the issuer exactly so"
        raise IssuerUnusable(name=issuer.name, reason=reason)
    try:
        return safe_url(str(document.get("jwks_uri")))
    except ValueError as error:
        raise IssuerUnusable(name=issuer.name, reason=f"{place}, jwks_uri: {error}") from error


class _Safe(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that can be trusted."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        safe_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _get(issuer: Issuer, url: str) -> bytes:
    opener = urllib.request.build_opener(_Safe())
    headers = {"accept": "application/json", "user-agent": "serin"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  safe_url has checked it
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise IssuerUnusable(name=issuer.name, reason=f"{url} answers {error.code}") from error
    except (OSError, HTTPException, ValueError, ssl.CertificateError) as error:
        raise IssuerUnusable(name=issuer.name, reason=f"{url} cannot be read ({error})") from error
    if len(body) > _MOST_BYTES:
        raise IssuerUnusable(name=issuer.name, reason=f"{url} sends more than {_MOST_BYTES} bytes")
    return body


def _checked(issuer: Issuer, content: bytes) -> dict[str, Any]:
    """Returns the usable public keys of a JWKS document, without anything else. A symmetric key is never one: who can
    read it can sign."""
    entries = _object(issuer, content).get("keys")
    if not isinstance(entries, list):
        raise IssuerUnusable(name=issuer.name, reason="its document is not a JSON Web Key Set")
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        if "d" in entry:
            raise IssuerUnusable(
                name=issuer.name, reason="its key set holds a private key; publish the public ones"
            )
        kind = entry.get("kty")
        usable = kind == "RSA" or entry.get("crv") in _CURVES.get(str(kind), ())
        if usable and entry.get("use", "sig") == "sig":
            found.append({name: entry[name] for name in _PUBLIC if isinstance(entry.get(name), str)})
    if not found:
        raise IssuerUnusable(name=issuer.name, reason="its key set holds no public key for signatures")
    return {"keys": found}


def _object(issuer: Issuer, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise IssuerUnusable(name=issuer.name, reason="its answer is not JSON") from error
    if not isinstance(document, dict):
        raise IssuerUnusable(name=issuer.name, reason="its answer is not a JSON object")
    return document
