"""Describes how the gateway is guarded, for `serin status`: TLS, API keys and the request filter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from serin.errors import GatewayRejected, KeyFileBroken
from serin.host.wiring import build_gateway, key_file
from serin.serving.triton.installation import NO_FILTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    tls: bool
    certificate_days: int | None  # until the current one expires
    keys_required: bool | None = None  # None: the key file is lost or broken, and the gateway is closed
    good_keys: int = 0
    issuers: int = 0
    trouble: str | None = None  # why the gateway is closed, and what to do
    lacks_filter: bool = False
    refused: Mapping[str, int] = field(default_factory=dict)  # by status, since the gateway was started

    @property
    def words(self) -> str:
        if not self.tls:
            tls = "no TLS"
        elif self.certificate_days is None:
            tls = "TLS"
        else:
            tls = f"TLS, the certificate expires in {self.certificate_days} days"
        if self.trouble:
            keys = f"NOT OPEN: {self.trouble}"
        elif self.keys_required:
            tokens = (
                f", {self.issuers} issuer{'s' if self.issuers != 1 else ''} of tokens" if self.issuers else ""
            )
            keys = f"API keys required ({self.good_keys} valid{tokens})"
        else:
            keys = "no API keys: anyone who can reach this port gets answers"
        refused = ", ".join(f"{count} x {status}" for status, count in self.refused.items())
        counts = [f"refused so far: {refused}"] if refused else []
        return "; ".join([tls, keys, *([NO_FILTER] if self.lacks_filter else []), *counts])


def read_guard(home: Path) -> Guard:
    gateway = build_gateway(home)
    days: int | None = None
    refused: dict[str, int] = {}
    tls, lacks_filter = gateway.tls.is_on, gateway.lacks_filter()
    with contextlib.suppress(GatewayRejected):
        refused = gateway.refused()
        days = gateway.admin.certificate_days() if tls else None
    guard = Guard(tls=tls, certificate_days=days, lacks_filter=lacks_filter, refused=refused)
    try:
        ring = key_file(home).read()
    except KeyFileBroken as error:
        return replace(guard, trouble=str(error))
    good = sum(1 for key in ring.keys if key.state(time.time()) == "good")
    return replace(guard, keys_required=ring.required, good_keys=good, issuers=len(ring.issuers))
