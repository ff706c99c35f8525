"""Addresses in Envoy's documents: host and port of `host:port`, and how hosts are resolved. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolved(hosts: Sequence[str]) -> dict[str, Any]:
    """Returns how the hosts of a cluster are resolved: host names are looked up repeatedly.

    If one has both kinds of address, Envoy would use IPv6 only, even if nothing listens there. By default it would open
    no port before every name is resolved, so that a slow name server kept a restarted gateway from all of its models.
    """
    try:
        for host in hosts:
            ip_address(host)
    except ValueError:
        return {"type": "STRICT_DNS", "dns_lookup_family": "V4_PREFERRED", "wait_for_warm_on_init": False}
    return {"type": "STATIC"}
