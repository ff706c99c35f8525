"""Finds free ports. Only a hint: the first process to bind a port has it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"


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
