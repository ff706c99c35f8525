"""Another user of this machine: what they can send to a port and what they can read. Needs root to become one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest

from serin.serving.envoy.api_types import SERVICE

UID = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user of the machine")

# The interpreter starts as root, whose files it may be one of. Setting the user drops root's capabilities, too.
_BECOME = f"""
import encodings.idna, json, os, socket, sys
os.setgroups([])
os.setgid({UID})
os.setuid({UID})
"""
# HTTP/2 is read until stream 1 has ended.
_SEND = """
port, sent, http2 = json.load(sys.stdin)
got = b""
def ended():
    at = 0
    while http2 and len(got) - at >= 9:
        kind, flags, stream = got[at + 3], got[at + 4], int.from_bytes(got[at + 5:at + 9], "big")
        if kind == 7 or stream == 1 and (kind == 3 or kind < 2 and flags & 1):
            return True
        at += 9 + int.from_bytes(got[at:at + 3], "big")
    return False
with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
    wire.sendall(bytes.fromhex(sent))
    try:
        while not ended() and (part := wire.recv(65536)):
            got += part
    except ConnectionResetError:
        pass
print(got.hex())
"""
_READ = """
found = {}
for path in json.load(sys.stdin):
    try:
        with open(path, "rb") as file:
            found[path] = file.read().hex()
    except OSError:
        pass
print(json.dumps(found))
"""

Headers = Sequence[tuple[bytes, bytes]]


def send(port: int, data: bytes, *, http2: bool = False) -> bytes:
    """Everything that comes back; nothing when the server hangs up."""
    return bytes.fromhex(_run(_SEND, [port, data.hex(), http2]))


def read(paths: Iterable[Path]) -> dict[str, bytes]:
    """The content of those files that can be read."""
    found = json.loads(_run(_READ, [str(path) for path in paths]))
    return {path: bytes.fromhex(content) for path, content in found.items()}


def grpc_status(port: int, method: str, message: bytes, headers: Headers) -> int | None:
    """Of a call with exactly these headers, legal or not; None when the call or the connection is reset."""
    state = h2.connection.H2Connection(
        h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
    )
    fixed = {b":method": b"POST", b":scheme": b"http", b":path": f"{SERVICE}/{method}".encode()}
    usual = {b":authority": b"x", b"content-type": b"application/grpc", b"te": b"trailers"}
    state.initiate_connection()
    state.send_headers(1, [*fixed.items(), *usual.items(), *headers])
    state.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    for event in state.receive_data(send(port, state.data_to_send(), http2=True)):
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            status = dict(event.headers or ()).get(b"grpc-status")
            if status is not None:
                return int(status)
    return None


def _run(program: str, given: object) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BECOME + program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd="/",
        env={},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
