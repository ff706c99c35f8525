"""The compiled guards of gateway and Triton: what they refuse, and what they do to the frames of a connection."""

import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hpack import Decoder

from serin.errors import TritonInstallFailed
from serin.serving.native import request_filter
from serin.serving.native.compiler import machine_compiler
from serin.serving.native.grpc_cancel_guard import (
    build_cancel_guard,
    cancel_guard_path,
    cancel_guard_variables,
)
from serin.serving.native.request_filter import build_request_filter, request_filter_path
from serin.serving.triton.installation import TritonInstall
from serin.serving.triton.process import new_place, triton_process
from serin.store.artifacts import Release
from tests.e2e import fuzz_json
from tests.e2e.fuzz_messages import EIGHT_BYTES, FOUR_BYTES, LENGTH, NUMBER, Field, written
from tests.e2e.fuzz_requests import good_body, good_frame
from tests.e2e.message_readers import TOO_LARGE, UNREADABLE, believed_by_protobuf, compare, packed
from tests.unit.serving.bundles import MODEL
from tests.unit.serving.compiled_reader import build_reader, run_reader


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "program"
    try:
        build_reader(path)
    except TritonInstallFailed as error:
        pytest.skip(str(error))
    return path


def judged(program: Path, texts: Sequence[bytes]) -> list[tuple[str, str, str, str]]:
    return run_reader(program, packed(texts))


def test_good_requests_pass_and_what_would_end_triton_does_not(program: Path) -> None:
    padded = b" " * 4096
    texts = {
        good_body(): "",
        b'{"shape": [1, 99]}': TOO_LARGE,
        b'{"shape": [99999': TOO_LARGE,
        b"[" * 5000: "the request's JSON is nested too deeply",
        b'"' + b"x" * 601 + b'"' + padded: "a text in the request is too long; at most 100 bytes are taken",
        b'"' + b"x" * 600 + b'"' + padded: "",
        b'"\\u0073hape"': "plain letters must not be written as \\u escapes",
        b'"\\\\u0073hape"': "",
    }
    assert [lines[0] for lines in judged(program, list(texts))] == list(texts.values())
    good = good_frame()[5:]
    assert judged(program, [good])[0][1] == believed_by_protobuf(good)
    assert believed_by_protobuf(good).startswith(f"{MODEL.encode().hex()}  ")
    assert judged(program, [b"\x2a\x05\x1a\x03\xff\xff\x7f"])[0][1] == TOO_LARGE
    assert judged(program, [b"\x0a\x7f"])[0][1] == UNREADABLE


def test_every_shape_is_found_and_every_size_is_read(program: Path) -> None:
    fits = [b"64", b" 64\t", b"8,8", b"0", b"6e1", b"", b"65x", b"x", b"0000000000000000064", b"[65"]
    too_large = [
        b"65",
        b"\n65 ",
        b"8,9",
        b"1e9",
        b"-1",
        b"nan",
        b"0000000000000000065",
        b"9" * 15,
        b"9" * 16,
        b"64.5",
    ]
    before = [b"", b'"', b'"shap', b'"shape"', b'"shape":[1]"', b'"shape""shape"', b"\"shape\":['shape']"]
    texts = [
        (first + b'"shape" :[' + sizes + b"]").ljust(64) for first in before for sizes in (*fits, *too_large)
    ]
    assert {len(text) for text in texts} == {64}
    wanted = [*[""] * len(fits), *[TOO_LARGE] * len(too_large)] * len(before)
    assert [lines[0] for lines in judged(program, texts)] == wanted


def test_a_message_is_read_as_protobuf_reads_it_or_refused(program: Path) -> None:
    """5,000 drawn messages; `make soak` draws 100,000."""
    found = compare(lambda texts: [lines[1:3] for lines in judged(program, texts)], number=1, count=5000)
    print(found)
    assert found.wrong == []
    assert min(found.equal, found.refused) > 1000


def test_nulls_are_written_out_as_python_reads_the_body_or_it_stays_as_it_is(program: Path) -> None:
    """5,000 drawn bodies, a quarter of them damaged; `make soak` draws 100,000."""
    found = fuzz_json.compare(
        lambda texts: [lines[3] for lines in judged(program, texts)], number=1, count=5000
    )
    print(found.counts)
    assert found.wrong == []
    assert min(found.counts[kind] for kind in ("same", "changed", "refused", "odd", "unreadable")) > 150


def test_a_name_in_a_refusal_is_short_and_readable(program: Path) -> None:
    shown = {
        b"n\xc3\xbcll": "nüll", b"\xff\x01": "??", b"x" * 41: "x" * 40 + "...", b"\xed\xa0\x80": "???",
        b"x" * 39 + "ü".encode(): "x" * 39 + "...",
    }  # fmt: skip
    body = b'{"inputs":[{"name":"%s","datatype":"INT8","data":[[0],[{}]]}]}'
    found = judged(program, [body % name for name in shown])
    assert [lines[3] for lines in found] == [
        f"!input '{name}', data[1][0]: {{}} is not an integer" for name in shown.values()
    ]


def test_depth_is_bounded_and_growth_is_known(program: Path) -> None:
    deep = b'{"inputs":[{"name":"x","datatype":"INT64","data":%s}]}'
    bodies = [deep % (b"[" * levels + b"null" + b"]" * levels) for levels in (32, 33, 60_000)]
    bodies.append(deep % (b"[" + b"null," * 20_000 + b"null]"))
    found = [lines[3] for lines in judged(program, bodies)]
    assert [len(each) // 2 for each in found] == [len(bodies[0]) + 16, 0, 0, len(bodies[3]) + 16 * 20_001]


def test_what_a_later_client_may_write_is_read(program: Path) -> None:
    """Fields that are not known yet, a list that is not packed, a length in more bytes than it needs."""
    name, shape = (
        Field(1, LENGTH, MODEL.encode()),
        [Field(3, NUMBER, 2), Field(3, LENGTH, b"\1\1"), Field(3, NUMBER, 1)],
    )
    later = {NUMBER: 2**63, EIGHT_BYTES: bytes(8), LENGTH: b"\xff", FOUR_BYTES: bytes(4)}
    messages = [
        [Field(number, wire, value), name] for wire, value in later.items() for number in (8, 2**29 - 1)
    ]
    messages += [[name, Field(5, LENGTH, shape)], [Field(1, LENGTH, MODEL.encode(), longer_length=3)]]
    texts = [written(each) for each in messages]
    assert [lines[1] for lines in judged(program, texts)] == list(map(believed_by_protobuf, texts))
    assert UNREADABLE not in map(believed_by_protobuf, texts)


def test_no_text_makes_it_read_what_is_not_there(program: Path) -> None:
    draw, good = random.Random(11), good_frame()[5:]
    words = [
        b'"shape":[',
        b"[",
        b"]",
        b",",
        b"9",
        b"1e9",
        b"\\u00",
        b"6",
        b"\\",
        b'"',
        b"{",
        b"\xff",
        b"\0",
        b" " * 4096,
    ]
    texts = [b"".join(draw.choices(words, k=draw.randrange(30))) for _ in range(3000)]
    texts += [good[: draw.randrange(len(good))] + draw.randbytes(draw.randrange(12)) for _ in range(3000)]
    texts += [draw.randbytes(draw.randrange(40)) for _ in range(3000)]
    found = judged(program, texts)
    assert {"", TOO_LARGE} < {lines[0] for lines in found}
    assert UNREADABLE in {lines[1] for lines in found}


def test_another_envoy_gets_another_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = request_filter_path(tmp_path)
    monkeypatch.setattr(request_filter.importlib.metadata, "version", lambda _: "1.41.0")
    assert request_filter_path(tmp_path) != now


def test_what_envoy_does_not_take_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "filter.cc").write_text("int nothing;\n")
    monkeypatch.setattr(request_filter, "SOURCES", sources)
    library = tmp_path / "made" / "filter.so"
    (sources / "filter.map").write_text("{ local: *; };\n")
    compiler = machine_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    with pytest.raises(TritonInstallFailed, match="envoy_dynamic_module_on_program_init"):
        build_request_filter(compiler, library)
    assert list(library.parent.iterdir()) == []


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
