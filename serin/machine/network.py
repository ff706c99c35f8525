"""The address at which other hosts reach this one, and its network interface."""

from __future__ import annotations

import fcntl
import socket
import struct

from serin.errors import SpecError
from serin.machine import environment

_SIOCGIFADDR = 0x8915
_SOMEWHERE = ("192.0.2.1", 9)  # nothing is sent there: connecting a UDP socket only chooses a route


def own_address() -> str:
    """SERIN_ADDRESS, else the IPv4 address of this host's name, else that of the route to other networks."""
    named = environment.address()
    if named is not None:
        return named
    for found in (_of_the_name(), _of_the_route()):
        if found is not None and not found.startswith("127."):
            return found
    problem = "the address of this host cannot be found out: its name has none, and it has no route"
    raise SpecError(where="SERIN_ADDRESS", problems=[("", f"{problem}; set it to an address of this host")])


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address, such as eth0; None when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _of_the_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _of_the_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_SOMEWHERE)
        except OSError:
            return None
        return str(probe.getsockname()[0])
