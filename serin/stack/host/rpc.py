"""XML-RPC to the supervisor over its unix socket, which only its owner can open."""

from __future__ import annotations

import http.client
import xmlrpc.client
from pathlib import Path
from typing import Any

from serin.errors import SupervisorGone, SupervisorRefused
from serin.machine.heartbeat import beat
from serin.machine.unix_http import UnixConnection


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__()
        self._path = path
        self._seconds = seconds

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = UnixConnection(self._path, self._seconds)
        self._connection = host, connection  # the base class closes this connection
        return connection


def call_supervisor(socket_path: Path, method: str, *arguments: Any, seconds: float = 10.0) -> Any:
    """Returns the answer of `supervisor.<method>`. Raises SupervisorRefused or, when nothing answers,
    SupervisorGone."""
    proxy = xmlrpc.client.ServerProxy("http://supervisor", transport=_UnixTransport(socket_path, seconds))
    beat(within_s=seconds)
    try:
        with proxy:
            return getattr(proxy.supervisor, method)(*arguments)
    except xmlrpc.client.Fault as fault:
        call = f"{method}{arguments}"
        raise SupervisorRefused(call=call, code=fault.faultCode, reason=fault.faultString) from fault
    except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
        raise SupervisorGone(socket=socket_path, reason=str(error)) from error
