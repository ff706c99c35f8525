"""How the gateway's door is guarded, for `serin status`: TLS or not, keys or not."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from serin.errors import GatewayRejected, KeyFileBroken
from serin.stack.wiring import build_gateway, key_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    tls: bool
    certificate_days: int | None  # until the one in force ends
    keys_required: bool | None  # None: the file of keys is lost or broken, and the gateway closed
    good_keys: int
    trouble: str | None = None  # why the gateway is closed, and what to do

    @property
    def words(self) -> str:
        if not self.tls:
            tls = "no TLS"
        elif self.certificate_days is None:
            tls = "TLS"
        else:
            tls = f"TLS, the certificate ends in {self.certificate_days} days"
        if self.trouble:
            keys = f"NOT OPEN: {self.trouble}"
        elif self.keys_required:
            keys = f"API keys are asked for ({self.good_keys} good)"
        else:
            keys = "no API keys: whoever reaches the port is answered"
        return f"{tls}; {keys}"


def key_trouble(home: Path) -> str | None:
    """Why the gateway is closed, and what to do; None when the keys can be read."""
    try:
        key_file(home).read()
    except KeyFileBroken as error:
        return str(error)
    return None


def read_guard(home: Path) -> Guard:
    gateway = build_gateway(home)
    days = None
    tls = gateway.speaks_tls()
    if tls:
        with contextlib.suppress(GatewayRejected):
            days = gateway.certificate_days()
    try:
        ring = key_file(home).read()
    except KeyFileBroken as error:
        return Guard(tls=tls, certificate_days=days, keys_required=None, good_keys=0, trouble=str(error))
    good = sum(1 for key in ring.keys if key.state(time.time()) == "good")
    return Guard(tls=tls, certificate_days=days, keys_required=ring.required, good_keys=good)
