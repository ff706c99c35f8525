"""Free TCP ports, safe against a second `serin up` that looks at the same moment."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from serin.errors import PortTaken
from serin.machine.ports import LOOPBACK, free_ports, is_free


class Claims:
    """The ports that this process has claimed until it ends.

    A port is bound only seconds after it was chosen, by a child. Until then an abstract unix socket named after the
    port represents it: the kernel makes the name exclusive, keeps it in the same network namespace as the port, and
    frees it when this process dies.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def claim(self, port: int, address: str = LOOPBACK) -> bool:
        """Claims `port`; True when it was free."""
        if not is_free(port, address):
            return False
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(f"\0serin-port-{port}")
        except OSError:
            holder.close()
            return False
        self._sockets.append(holder)
        return True

    def release(self) -> None:
        for holder in self._sockets:
            holder.close()
        self._sockets.clear()


@contextlib.contextmanager
def port_claims() -> Iterator[Claims]:
    claims = Claims()
    try:
        yield claims
    finally:
        claims.release()


def choose_port(
    claims: Claims,
    *,
    asked: int | None,
    option: str,
    preferred: tuple[int, ...],
    address: str = LOOPBACK,
) -> int:
    """Returns the requested port or raises PortTaken; without one, the first free preferred port, else any."""
    if asked is not None:
        if not claims.claim(asked, address):
            raise PortTaken(port=asked, option=option)
        return asked
    for port in preferred:
        if claims.claim(port, address):
            return port
    while True:
        (port,) = free_ports(1)
        if claims.claim(port, address):
            return port
