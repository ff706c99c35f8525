"""Which Prefect server is used, and with which login.

The login of the stack's own server is created at the first start, in a file that only its owner can read.

Anyone who may talk to the server may run code here, so the server admits nobody else. The secret is passed in the
environment of the stack's own processes and in this file, never on a command line and never in a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from serin.errors import NotUp
from serin.host.state import Stack, running_here
from serin.machine import environment
from serin.machine.durable import own_secret
from serin.prefect.rest_api import Api, answers


def login_file(home: Path) -> Path:
    return home / "prefect-login"


def make_login(home: Path) -> str:
    """Returns `user:password` of this home and creates it if needed."""
    return own_secret(login_file(home), "serin:")


def read_login(home: Path) -> str | None:
    """Returns `user:password`, or None where no stack was ever started."""
    return make_login(home) if login_file(home).exists() else None


def stack_api(stack: Stack) -> Api:
    """Returns the stack's Prefect server with its credentials: its own login, or the caller's for another server."""
    if stack.owns_prefect:
        return Api(stack.prefect_api_url, read_login(stack.home))
    return callers_api(stack.prefect_api_url)


def callers_api(url: str) -> Api:
    """Returns a server that is not the stack's own, with the credentials of the caller."""
    shown = environment.prefect_credentials()
    return Api(url, shown.get("PREFECT_API_AUTH_STRING"), shown.get("PREFECT_API_KEY"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectServer:
    """The server whose runs a command shows. `stack`: of this home; None: PREFECT_API_URL names the server, and its
    workers are on other machines."""

    home: Path
    api: Api
    stack: Stack | None = None

    @property
    def ui_url(self) -> str:
        return self.api.url.rstrip("/").removesuffix("/api")

    @property
    def is_own(self) -> bool:
        return self.stack is not None and self.stack.owns_prefect

    @property
    def is_alive(self) -> bool:
        """Whether what must be up on this machine is up."""
        return self.stack is None or self.stack.is_alive


def find_server(home: Path) -> PrefectServer | None:
    """Returns the server of the stack in `home`; without a stack the one that PREFECT_API_URL names."""
    stack = running_here(home)
    if stack is not None and stack.prefect_api_url:
        return PrefectServer(home=home, api=stack_api(stack), stack=stack)
    url = named_server()
    return None if url is None else PrefectServer(home=home, api=callers_api(url))


def needed_server(home: Path) -> PrefectServer:
    """The same; NotUp when there is none."""
    found = find_server(home)
    if found is None:
        raise NotUp(home=home)
    return found


def named_server() -> str | None:
    """Returns the server that PREFECT_API_URL names. A dead one on this machine was a stack's: None."""
    url = environment.text("PREFECT_API_URL")
    local = url is not None and urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    return None if url is None or (local and not answers(url)) else url
