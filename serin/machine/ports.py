"""Finds free TCP ports, and makes unix sockets. A free port is only a hint: the first process to bind it has it. Claims
are safe against a second `serin up` that looks at the same moment."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from serin.errors import PortTaken

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def private_socket(path: Path) -> socket.socket:
    """A unix socket that only the owner of this process can open."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    path.chmod(0o600)
    return made


def free_ports(count: int, *, but: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns `count` ports that nothing listens on now, none of them in `but`."""
    avoided = set(but)
    found: list[int] = []
    with ExitStack() as held:  # all are held until the last is found, so that they differ
        while len(found) < count:
            holder = held.enter_context(socket.socket())
            holder.bind((LOOPBACK, 0))
            port: int = holder.getsockname()[1]
            if port not in avoided:
                found.append(port)
    return tuple(found)


def is_free(port: int, address: str = LOOPBACK) -> bool:
    """Returns whether a process could listen at the port of this address. Port 0: whether the address is this
    machine's."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)  # a port that is bound but not listened on yet can be bound a second time
        except OSError:
            return False
    return True


class Claims:
    """The ports that this process has claimed until the block ends.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._sockets:
            holder.close()


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
