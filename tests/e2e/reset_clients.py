"""Clients that give up gRPC calls, at every moment of a call; and the memory that the servers keep after that."""

import random
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import psutil

from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.store.artifacts import Release
from tests.e2e.fuzz_requests import framed, good_frame
from tests.e2e.serving_stack import Stack

MOMENTS = ("before body", "in prefix", "in body", "whole but open", "computing", "answering")
_LONGEST_WAIT_S = 0.003  # as long as a call of one row takes
_HEADERS = {
    ":method": "POST", ":scheme": "http", ":path": f"{SERVICE}/ModelInfer", ":authority": "x",
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip


def padded_frame(size: int) -> bytes:
    """A good message with one more raw input of `size` bytes, which Triton refuses once it has read all of it."""
    length = bytearray()
    left = size
    while left >= 128:
        length.append(128 | left & 127)
        left >>= 7
    return framed(good_frame()[5:] + b"\x3a" + bytes([*length, left]) + bytes(size))


class Resetter:
    """One HTTP/2 connection on which each call is reset."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self._draw = draw
        self._wire = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._state.initiate_connection()
        self._gone: set[int] = set()  # streams that the server has ended
        self._answered: set[int] = set()  # streams of which something came back

    def close(self) -> None:
        self._wire.close()

    def settle(self) -> None:
        """Waits until a good call is answered: those before it have been."""
        stream = self._state.get_next_available_stream_id()
        self._state.send_headers(stream, list(_HEADERS.items()))
        self._send(stream, good_frame(), end=True)
        while stream not in self._gone:
            self._read(20.0)

    def give_up(self, frame: bytes, moment: str) -> None:
        """One call, given up at this moment, or ("answered") not at all."""
        stream = self._state.get_next_available_stream_id()
        self._state.send_headers(stream, list(_HEADERS.items()))
        cut = {"before body": 0, "in prefix": self._draw.randrange(1, 5)}.get(moment, len(frame))
        if moment == "in body":
            cut = self._draw.randrange(5, len(frame))
        self._send(stream, frame[:cut], end=moment in ("computing", "answering", "answered"))
        if moment == "computing":
            time.sleep(self._draw.uniform(0.0, _LONGEST_WAIT_S))
        while moment == "answering" and stream not in self._answered:
            self._read(20.0)
        while moment == "answered" and stream not in self._gone:
            self._read(20.0)
        self._reset(stream)
        self._read(0.0)

    def _send(self, stream: int, data: bytes, *, end: bool) -> None:
        """As fast as the server takes it."""
        at = 0
        while at < len(data):
            room = min(self._state.local_flow_control_window(stream), self._state.max_outbound_frame_size)
            part = data[at : at + room]
            if not part:
                self._flush()
                self._read(20.0)
                continue
            at += len(part)
            self._state.send_data(stream, part, end_stream=end and at == len(data))
            self._flush()
            self._read(0.0)
        self._flush()

    def _reset(self, stream: int) -> None:
        if stream not in self._gone:
            self._state.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    def _flush(self) -> None:
        self._wire.sendall(self._state.data_to_send())

    def _read(self, within_s: float) -> None:
        if not select.select([self._wire], [], [], within_s)[0]:
            assert within_s == 0.0, f"nothing came within {within_s:g} s"
            return
        data = self._wire.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        for event in self._state.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived | h2.events.DataReceived):
                self._answered.add(event.stream_id)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self._gone.add(event.stream_id)
                self._answered.add(event.stream_id)
            elif isinstance(event, h2.events.ConnectionTerminated):
                raise ConnectionResetError(f"the server said goodbye: {event.error_code}")
            if isinstance(event, h2.events.DataReceived):
                self._state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self._flush()


def give_up_calls(
    port: int, count: int, *, number: int, frame: bytes, moments: Sequence[str] = MOMENTS, each: int = 20
) -> Counter[str]:
    """`count` calls, and how many at which moment. A connection is closed after `each`, whatever is under way on it:
    for the gateway. Triton 2.51 does not survive this."""
    draw, seen = random.Random(number), Counter[str]()
    while sum(seen.values()) < count:
        client = Resetter(port, draw)
        try:
            for _ in range(min(each, count - sum(seen.values()))):
                moment = draw.choice(moments)
                client.give_up(frame, moment)
                seen[moment] += 1
        finally:
            client.close()
    return seen


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident megabytes: of Envoy, and of the Triton of one release with its children."""

    envoy: float
    triton: float

    def __str__(self) -> str:
        return f"Triton {self.triton:.0f} MB, Envoy {self.envoy:.0f} MB"


def memory(stack: Stack, release: Release) -> Memory:
    def resident(name: str) -> float:
        process = psutil.Process(stack.host.pid(name) or 0)
        total = 0
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
        return total / 1e6

    return Memory(envoy=resident(PROCESS_NAME), triton=resident(release.name))
