"""An HTTP/2 client that reports every reset: other clients hide one that comes with an answer, or trip over it."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions

PIECE_BYTES = 16_000


class H2Client:
    """One connection. Requests are sent one after another: the headers first, and the body once they were read."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        wire = socket.create_connection(("127.0.0.1", port), timeout=30)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            context.set_alpn_protocols(["h2"])
            wire = context.wrap_socket(wire, server_hostname="localhost")
        self._scheme = "https" if context else "http"
        self._wire = wire
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._state.initiate_connection()
        self._flush()

    def __enter__(self) -> H2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()

    def ask(
        self,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        declared: bool = True,
    ) -> tuple[int, Any]:
        """Status and JSON of the answer; AssertionError when the stream was reset. `declared`: with a length."""
        stream = self._state.get_next_available_stream_id()
        fields = {
            ":method": "GET" if body is None else "POST",
            ":scheme": self._scheme,
            ":path": path,
            ":authority": "localhost",
            **({"content-length": str(len(body))} if body is not None and declared else {}),
            **(headers or {}),
        }
        self._seen: list[h2.events.Event] = []
        self._state.send_headers(stream, list(fields.items()), end_stream=body is None)
        self._settle()
        if body is not None:
            self._send(stream, body)
        self._receive(lambda: any(isinstance(event, h2.events.StreamEnded) for event in self._seen))
        self._settle()  # a reset that follows the answer
        return self._answer()

    def _send(self, stream: int, body: bytes) -> None:
        begin = 0
        while begin < len(body):
            self._receive(lambda: self._state.local_flow_control_window(stream) > 0)
            length = min(PIECE_BYTES, self._state.local_flow_control_window(stream), len(body) - begin)
            self._state.send_data(stream, body[begin : begin + length])
            self._flush()
            begin += length
        self._state.end_stream(stream)
        self._flush()

    def _settle(self) -> None:
        """The gateway has read everything that was sent, and what it said to that is here."""
        self._state.ping(b"settled?")
        self._flush()
        asked = len(self._seen)
        self._receive(
            lambda: any(isinstance(event, h2.events.PingAckReceived) for event in self._seen[asked:])
        )

    def _receive(self, done: Any) -> None:
        while not done():
            data = self._wire.recv(65_536)
            assert data, f"the connection was closed: {self._seen}"
            for event in self._state.receive_data(data):
                reset = isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated))
                assert not reset, f"{event} after {self._seen}"
                self._seen.append(event)
            self._flush()

    def _flush(self) -> None:
        self._wire.sendall(self._state.data_to_send())

    def _answer(self) -> tuple[int, Any]:
        (head,) = [event for event in self._seen if isinstance(event, h2.events.ResponseReceived)]
        text = b"".join(event.data for event in self._seen if isinstance(event, h2.events.DataReceived))
        return int(dict(head.headers)[":status"]), json.loads(text) if text.startswith(b"{") else text
