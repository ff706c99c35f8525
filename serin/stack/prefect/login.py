"""The stack's login to its Prefect server: created at the first start, in a file that only its owner can read.

Anyone who may talk to the server may run code here, so the server admits nobody else. The secret is passed in the
environment of the stack's own processes and in this file, never on a command line and never in a log.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from serin.errors import StackUnusable
from serin.machine.durable import create_secret
from serin.machine.environment import prefect_credentials
from serin.machine.private import make_private
from serin.stack.host.state import Stack
from serin.stack.prefect.rest_api import Api

_USER = "serin"


def login_file(home: Path) -> Path:
    return home / "prefect-login"


def make_login(home: Path) -> str:
    """Returns `user:password` of this home and creates it if needed; two concurrent calls get the same."""
    found = read_login(home)
    if found is not None:
        return found
    make_private(home)
    create_secret(login_file(home), f"{_USER}:{secrets.token_urlsafe(32)}\n")
    made = read_login(home)
    assert made is not None
    return made


def read_login(home: Path) -> str | None:
    """Returns `user:password`, or None where no stack was ever started. Raises StackError when others could have read
    it."""
    path = login_file(home)
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StackUnusable(
            problem=f"{path} cannot be read: {error}; remove it, and `serin up` creates another"
        ) from error
    if mode & 0o077:
        raise StackUnusable(
            problem=f"{path} can be read by others; run `serin down`, remove it, and `serin up` creates another"
        )
    if text.count(":") != 1 or not all(text.split(":")):
        raise StackUnusable(problem=f"{path} contains no login; remove it, and `serin up` creates another")
    return text


def stack_api(stack: Stack) -> Api:
    """Returns the stack's Prefect server with its credentials: its own login, or the caller's for another server."""
    if stack.owns_prefect:
        return Api(stack.prefect_api_url, read_login(stack.home))
    shown = prefect_credentials()
    login, key = shown.get("PREFECT_API_AUTH_STRING"), shown.get("PREFECT_API_KEY")
    return Api(stack.prefect_api_url, login, key)
