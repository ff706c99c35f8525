"""The state file of a running stack, <home>/stack.json, and the lock for changing it."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from serin.errors import NotUp, StackUnusable
from serin.machine.documents import read_json
from serin.machine.durable import create_secret, write_whole
from serin.machine.locks import locked
from serin.machine.ports import LOOPBACK
from serin.machine.process import start_ticks
from serin.machine.typed_json import Document, Stored

POOLS = ("cpu", "gpu")  # of Prefect; the stack has a worker in each

_LOST = (
    "a stack that runs here keeps serving; `serin down` ends it and moves this file aside, then `serin up` starts it "
    "again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Document, form="serin.stack"):
    """A stack that was started. `is_alive` tells whether it still runs."""

    home: Annotated[Path, Stored(Path, str)]
    gateway_port: int
    supervisor_pid: int = 0  # 0: not launched yet
    supervisor_ticks: int = -1
    since: float = 0.0
    prefect_api_url: str = ""
    prefect_port: int | None = None  # None: a server that the stack did not start
    address: str = LOOPBACK  # on which the gateway listens
    tls: bool = False  # whether the gateway uses TLS
    pages_port: int | None = None  # where other machines reach the console and Prefect's API
    console_url: str | None = None  # None: the console does not run here
    console_port: int | None = None
    agent: bool = False  # an agent runs here, and a controller elsewhere decides
    agent_pid: int | None = None  # of the `serin agent` in the foreground
    agent_ticks: int = 0

    @property
    def owns_prefect(self) -> bool:
        return self.prefect_port is not None

    @property
    def gateway_url(self) -> str:
        address = ip_address(self.address)
        host = (
            LOOPBACK if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
        )
        return f"{'https' if self.tls else 'http'}://{host}:{self.gateway_port}"

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the gateway."""
        return not ip_address(self.address).is_loopback

    @property
    def pages_url(self) -> str | None:
        """The address for other machines; this one's name stands for all of its addresses."""
        if self.pages_port is None:
            return None
        host = socket.gethostname() if ip_address(self.address).is_unspecified else self.address
        return f"https://{f'[{host}]' if ':' in host else host}:{self.pages_port}"

    @property
    def prefect_ui_url(self) -> str:
        return self.prefect_api_url.removesuffix("/").removesuffix("/api")

    @property
    def is_alive(self) -> bool:
        return start_ticks(self.supervisor_pid) == self.supervisor_ticks

    @property
    def agent_is_alive(self) -> bool:
        """Whether the foreground process of an agent lives. Gateway and releases run on without it."""
        return self.agent_pid is not None and start_ticks(self.agent_pid) == self.agent_ticks


def stack_file(home: Path) -> Path:
    return home / "stack.json"


def stack_name(home: Path) -> str:
    """Returns a unique name of the stack in `home`: the host's name for people, and a random part that is drawn
    once."""
    file = home / "stack" / "name"
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "host"
        file.parent.mkdir(parents=True, exist_ok=True)
        create_secret(file, f"{host}-{secrets.token_hex(4)}\n")
        return file.read_text().strip()


def read_stack(home: Path) -> Stack | None:
    """Returns the stack last started in `home`, alive or not; None when there is none. Raises FileBroken when its file
    cannot be read: a stack may run, and must not be taken for one that does not."""
    return read_json(stack_file(home), Stack.from_json, advice=_LOST)


def write_stack(stack: Stack) -> None:
    write_whole(stack_file(stack.home), json.dumps(stack.to_json(), indent=2) + "\n")


def running_here(home: Path) -> Stack | None:
    """Returns the stack that runs in `home`; None when there is none."""
    stack = read_stack(home)
    return stack if stack is not None and stack.is_alive else None


def running_stack(home: Path) -> Stack:
    """Returns the stack that runs in `home`, or raises NotUp."""
    stack = running_here(home)
    if stack is None:
        raise NotUp(home=home)
    return stack


@contextlib.contextmanager
def changing_stack(home: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Allows one `up` or `down` at a time in `home`; the kernel frees the lock when its holder dies."""
    folder = home / "stack"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder / "lock", wait_s=wait_s, mode=0o600))
        except TimeoutError:
            raise StackUnusable(
                problem=f"another `serin up` or `serin down` is changing {home}; wait for it to end"
            ) from None
        yield
