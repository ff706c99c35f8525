"""Sessions of the console: a signed cookie that only the browser's requests to the console carry.

Nothing is stored on the server. A session ends with its time, or when the secret of its role is replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jwt

from serin.host.console import ROLES, Role, signing_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who is logged in. `who` is written into the journal with what they do."""

    role: Role
    who: str
    ends: float
    id: str

    @property
    def may_act(self) -> bool:
        return self.role == "operator"


def new_session(role: Role, who: str, *, lasts_s: float) -> Session:
    return Session(role=role, who=who, ends=time.time() + lasts_s, id=secrets.token_urlsafe(16))


def session2cookie(home: Path, session: Session) -> str:
    return seal(asdict(session), signing_key(home, session.role))


def cookie2session(home: Path, cookie: str) -> Session | None:
    """Returns the session of a cookie; None for one that is forged, expired or signed with an old secret."""
    for role in ROLES:
        value = unseal(cookie, signing_key(home, role))
        if value is not None and value.get("role") == role:
            session = Session(**value)
            return session if session.ends > time.time() else None
    return None


def csrf_token(home: Path, session: Session) -> str:
    """Returns what a form must contain: another site can neither read nor guess it."""
    return hmac.new(
        signing_key(home, session.role), f"csrf:{session.id}".encode(), hashlib.sha256
    ).hexdigest()


def seal(value: Mapping[str, Any], key: bytes) -> str:
    """Returns `value` with a signature, for a cookie. It can be read by anyone who has it."""
    return jwt.encode(dict(value), key, algorithm="HS256")


def unseal(text: str, key: bytes) -> dict[str, Any] | None:
    """Returns the value that was sealed with this key; None for anything else."""
    try:
        return dict(jwt.decode(text, key, algorithms=["HS256"]))
    except jwt.InvalidTokenError:
        return None
