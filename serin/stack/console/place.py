"""Where the console of a stack answers, and whether it can run in this environment."""

from __future__ import annotations

import importlib.util
import urllib.request
from dataclasses import dataclass

from serin.stack.console.settings import LOOPBACK, ConsoleSettings
from serin.stack.host.ports import Claims, choose_port

NOT_INSTALLED = (
    "the console is not installed here; to get it: pip install 'serin[console]', then `serin up` again"
)

_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)
_PORTS = (8090, 8091, 8092)
_NEEDED = ("starlette", "uvicorn", "jinja2", "jwt")


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
