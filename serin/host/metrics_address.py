"""Where the stack's metrics are served: an address that stays the same over restarts, kept in a file of the home."""

from __future__ import annotations

import json
from pathlib import Path

from serin.machine import environment
from serin.machine.durable import write_whole

LOOPBACK = "127.0.0.1"

_PORTS = (9464, 9465, 9466)
_FORMAT, _VERSION = "serin.metrics", 1


def candidates(home: Path) -> list[tuple[str, int]]:
    """Returns the addresses to try, the best first. SERIN_METRICS names the only one; port 0 is any free port."""
    if asked := environment.metrics_address():
        return [asked]
    last = read_address(home)
    ports = dict.fromkeys((*((last[1],) if last else ()), *_PORTS, 0))
    return [(LOOPBACK, port) for port in ports]


def read_address(home: Path) -> tuple[str, int] | None:
    """Returns the host and the port that were last in use; None when there were none."""
    try:
        found = json.loads(_file(home).read_text(encoding="utf-8"))
        return str(found["host"]), int(found["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def metrics_url(home: Path) -> str | None:
    """Returns the address for people and for Prometheus."""
    found = read_address(home)
    return f"http://{found[0]}:{found[1]}/metrics" if found else None


def write_address(home: Path, host: str, port: int) -> None:
    _file(home).parent.mkdir(parents=True, exist_ok=True)
    document = {"format": _FORMAT, "version": _VERSION, "host": host, "port": port}
    write_whole(_file(home), json.dumps(document))


def remove_address(home: Path) -> None:
    """Called when the metrics are served nowhere."""
    _file(home).unlink(missing_ok=True)


def token_file(home: Path) -> Path:
    """The secret that a scraper sends: any user of the machine can reach the port."""
    return home / "metrics-token"


def _file(home: Path) -> Path:
    return home / "watch" / "metrics.json"
