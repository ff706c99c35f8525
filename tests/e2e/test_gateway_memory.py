"""Many slow requests with large bodies: the gateway gives them up, keeps to its memory and answers everybody else."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import h2.config
import h2.connection
import h2.events
import psutil
import pytest

from serin.serving.envoy.gateway import PROCESS_NAME
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.e2e.test_gateway_limits import INFER, lead_to

MB = 1 << 20
LIMIT_MB = 100
BODY_MB = 31  # of 32 that are announced: the last one never comes
PIECE = bytes(MB)


def announce(port: int) -> socket.socket:
    wire = socket.create_connection(("127.0.0.1", port), timeout=60)
    wire.sendall(f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {32 * MB}\r\n\r\n".encode())
    return wire


def send_slowly(wire: socket.socket) -> str:
    """All but the end of the body; the status of the answer that comes before, `reset`, or `held`."""
    try:
        for _ in range(BODY_MB):
            wire.sendall(PIECE)
    except OSError:
        pass
    readable, _, _ = select.select([wire], [], [], 0.5)
    try:
        return wire.recv(12)[9:].decode() or "reset" if readable else "held"
    except ConnectionResetError:
        return "reset"


def send_streams(port: int, count: int) -> str:
    """The same by HTTP/2, on one connection: what came of the first stream that ended."""
    state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    fixed = {":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "x"}
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        state.initiate_connection()
        left: dict[int, int] = {}
        for stream in range(1, 2 * count, 2):
            state.send_headers(stream, [*fixed.items(), ("content-length", str(32 * MB))])
            left[stream] = BODY_MB * MB
        while any(left.values()):
            for stream, bytes_left in left.items():
                size = min(bytes_left, state.local_flow_control_window(stream), state.max_outbound_frame_size)
                if size:
                    state.send_data(stream, PIECE[:size])
                    left[stream] -= size
            try:
                data = state.data_to_send()
                wire.sendall(data)
                if data and not select.select([wire], [], [], 0)[0]:
                    continue
                received = wire.recv(65536)
            except ConnectionResetError:
                return "reset"
            for event in state.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived):
                    return str(dict(event.headers or ())[":status"])
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    return "reset"
    return "held"


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """The most megabytes that the process takes within the block, in a list of one."""
    process, done, peak = psutil.Process(pid), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss // MB)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join(10)


def lives(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
def test_slow_large_requests_end_in_refusals_and_the_gateway_keeps_to_its_memory(protocol: str) -> None:
    with lone_gateway(max_heap_bytes=LIMIT_MB * MB, max_connections=100) as (gateway, port, host):
        lead_to(gateway)
        pid = host.pid(PROCESS_NAME)
        assert pid
        wait_for("the gateway", lambda: lives(port), host, PROCESS_NAME)
        before = psutil.Process(pid).memory_info().rss // MB
        with peak_of(pid) as peak:
            if protocol == "HTTP/2":
                ends = Counter([send_streams(port, 10)])
            else:
                wires = [announce(port) for _ in range(16)]
                with ThreadPoolExecutor(len(wires)) as senders:
                    ends = Counter(senders.map(send_slowly, wires))
                wait_for("room, while the others are held", lambda: lives(port), host, PROCESS_NAME)
                for wire in wires:
                    wire.close()
        print(
            f"{protocol}: {dict(ends)}, {before} MB before, at most {peak[0]} MB, limit {LIMIT_MB} MB of heap"
        )
        refused = sum(ends.values()) - ends["held"]
        assert set(ends) <= {"503", "408", "reset", "held"}
        assert refused >= 1
        assert peak[0] < before + 2 * LIMIT_MB, "what comes between two looks is on top of the limit"
        wait_for("room", lambda: lives(port), host, PROCESS_NAME)
        assert host.pid(PROCESS_NAME) == pid
