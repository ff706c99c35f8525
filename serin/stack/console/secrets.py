"""The secrets of the console: one for each role and the key that signs sessions, in files only their owner can read.

They are on no command line, in no URL and in no log. Changing a role's secret ends the sessions of that role.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Literal, get_args

from serin.errors import StackUnusable
from serin.machine.durable import create_secret, write_secret
from serin.machine.private import make_private

Role = Literal["viewer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

_SIGNING = "session-key"


def secret_file(home: Path, role: Role) -> Path:
    return _folder(home) / f"{role}-secret"


def role_secret(home: Path, role: Role) -> str:
    """Returns the secret of a role and creates it if needed; two concurrent calls get the same."""
    return own_secret(secret_file(home, role))


def rotate_secret(home: Path, role: Role) -> str:
    """Replaces the secret of a role. Everyone who logged in with the old one must log in again."""
    make_private(_folder(home))
    write_secret(secret_file(home, role), f"{secrets.token_urlsafe(32)}\n")
    return role_secret(home, role)


def signing_key(home: Path, role: Role) -> bytes:
    """Returns the key that signs the sessions of a role: it changes with the role's secret."""
    key = own_secret(_folder(home) / _SIGNING)
    return hmac.digest(key.encode(), f"{role}:{role_secret(home, role)}".encode(), hashlib.sha256)


def matching_role(home: Path, given: str) -> Role | None:
    """Returns the role whose secret was given. Takes the same time for every answer."""
    found: Role | None = None
    for role in ROLES:
        if hmac.compare_digest(role_secret(home, role).encode(), given.encode()):
            found = role
    return found


def _folder(home: Path) -> Path:
    return home / "console"


def own_secret(path: Path) -> str:
    """Returns the secret in a file that only its owner can read, and creates it if needed."""
    for _ in range(2):
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            make_private(path.parent)
            create_secret(path, f"{secrets.token_urlsafe(32)}\n")
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise StackUnusable(
                problem=f"{path} cannot be read: {error}; remove it to get another"
            ) from error
        if mode & 0o077 or len(text) < 32:
            raise StackUnusable(
                problem=f"{path} can be read by others or contains no secret; remove it to get another"
            )
        return text
    raise StackUnusable(problem=f"{path} disappears as soon as it is written")
