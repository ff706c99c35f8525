"""The gRPC cancel guard: what it does to the frames of a connection in a separate process, and when there is none."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hpack import Decoder

from serin.machine.native.compiler import machine_compiler
from serin.serving.native.grpc_cancel_guard import (
    build_cancel_guard,
    cancel_guard_path,
    cancel_guard_variables,
)
from serin.serving.triton.installation import TritonInstall
from serin.serving.triton.process import new_place, triton_process
from serin.store.artifacts import Release

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RESET = 0x1, 0x3
END_STREAM, END_HEADERS = 0x1, 0x4
SERVER = """if True:
    import os, socket, sys
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        listener.listen()
        wire, _ = listener.accept()
        while got := wire.recvmsg(int(sys.argv[2]))[0]:
            sys.stdout.buffer.write(got)
"""


def frame(kind: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + (3).to_bytes(4, "big") + payload


def trailers(payload: bytes) -> bytes:
    """What a reset becomes: as many fields of one byte, and the end of the stream."""
    fields = b"\x90" * len(payload)
    assert all(
        field == (b"accept-encoding", b"gzip, deflate") for field in Decoder().decode(fields, raw=True)
    )
    return frame(HEADERS, fields, END_STREAM | END_HEADERS)


def frames(*, shielded: bool) -> bytes:
    """Threes everywhere, and some that say that a stream is reset."""
    drawn, made = random.Random(3), PREFACE + frame(4, b"")
    for _ in range(200):
        kind, flags = drawn.choice([0, 1, 8, RESET]), drawn.choice([0, 3])
        payload = b"\x03" * drawn.choice([0, 3, 4, 300])
        made += trailers(payload) if shielded and kind == RESET else frame(kind, payload, flags)
    return made


def received(data: bytes, library: Path, *, piece: int, watched: bool) -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        variables = cancel_guard_variables(library, port if watched else port + 1)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno()), str(piece)],
            pass_fds=[listener.fileno()], env=variables, stdout=subprocess.PIPE,
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
            wire.sendall(data)
    return server.communicate(timeout=20)[0]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = machine_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    place = cancel_guard_path(tmp_path_factory.mktemp("triton"))
    build_cancel_guard(compiler, place)
    return place


@pytest.mark.parametrize("piece", [1, 7, 65536])
def test_a_reset_becomes_the_end_of_the_clients_side_and_nothing_else_is_changed(
    library: Path, piece: int
) -> None:
    assert received(frames(shielded=False), library, piece=piece, watched=True) == frames(shielded=True)


def test_other_ports_are_left_alone(library: Path) -> None:
    sent = frames(shielded=False)
    assert received(sent, library, piece=100, watched=False) == sent


def test_a_release_gets_the_guard_that_its_triton_has_for_its_own_port(tmp_path: Path) -> None:
    release = Release(model="m", version=1)
    place = new_place(release, (1, 2, 3))
    for guard in (None, tmp_path / "guard.so"):
        install = TritonInstall(
            server=tmp_path, backends=tmp_path, python_folder=tmp_path, libraries=(), cancel_guard=guard
        )
        given = triton_process(install, release, tmp_path, place, tmp_path / "log").environment
        assert given.get("SERIN_GRPC_PORT") == ("2" if guard else None)
        assert given.get("LD_PRELOAD") == (str(guard) if guard else None)
