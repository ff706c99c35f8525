"""python -m tests.soak.compilers: the request filter answers the same whichever compiler built it.

Installs PyPI's ziglang into a scratch environment, hides the machine's compilers, builds the three libraries with it,
and sends some 850 requests, good, bad and at the limits, to a gateway with that filter and to one with the filter that
`serin install triton` built. Fails when two answers differ. Takes minutes: ziglang compiles its C++ runtime first.
"""

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc

from serin.serving.native import onnx_backend
from serin.serving.native.compiler import obtain_compiler
from serin.serving.native.grpc_cancel_guard import build_cancel_guard
from serin.serving.native.request_filter import build_request_filter
from serin.serving.triton.installation import find_triton
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.test_request_filter import GOOD, INFER, LENGTH, TEXT_BYTES, call, echoing, post
from tests.unit.serving.bundles import MODEL

PATHS = [
    INFER, f"{INFER}?a=1", f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}/ready", "/v2/infer",
]  # fmt: skip
LENGTHS = ["", "0", "7", "x", "-1", "+3", " 5", "1e1", "0x9", "9" * 30, "1, 2", "99999"]
HEADERS = [
    {"content-encoding": "gzip"},
    {"content-encoding": ""},
    {"authorization": "Bearer serin_abc"},
    {"authorization": "Basic abc"},
    {"x-serin-model": "other", "x-serin-may": ",x,"},
    {"expect": "100-continue"},
]
SHAPES = [
    "[]", "[1]", "[1,2]", "[ 1 , 2 ]", "[-1]", "[2.5, 2]", "[1e3]", "[1e300, 0]", "[0, 99999]", "[99999, 0]", "[99999",
    "[,,]", '["99999"]', "[null]", "[[99999]]", "[0x7fffffff]", "[inf]", "[ ]", "{}", "99999", "[1\n,\t99999]",
    "[999999999999999999999999]", "[1] [99999]", "[100000]]",
]  # fmt: skip
KEYS = [
    '"shape"', '"shape" ', '"shape"  ', "'shape'", '"sh\\u0061pe"', '"sh\\\\u0061pe"', '\\"shape"',
]  # fmt: skip
BODIES = [
    "", "[" * 5000, "[" * 30 + "]" * 5000, '{"a":' * 1000, " " * 5000, '"' + "[" * 4095 + '"', '"' + "\\" * 5000,
    "\\u0061", "\\", '"\\u00', '"shape":', '"shape"', '"shape":[', '"' + "x" * 5000,
    *(f'"{"x" * (6 * TEXT_BYTES + more)}"' + " " * 4000 for more in (-9, 0, 9)),
    *('"' + "\\u0020" * (TEXT_BYTES + more) + '"' + " " * 4000 for more in (-9, 0, 9)),
]  # fmt: skip


def web_cases() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    text = json.dumps(GOOD).encode()
    for path in PATHS:
        yield path, text, {}
        yield path, b'{"shape":[99999]}', {}
    for headers in (*HEADERS, *({LENGTH: length} for length in (*LENGTHS, str(len(text))))):
        yield INFER, text, headers
    for shape in SHAPES:
        for key in KEYS:
            yield INFER, f'{{"inputs": [{{{key}:{shape}}}]}}'.encode(), {}
    for body in BODIES:
        yield INFER, body.encode(), {}


def random_bodies(count: int) -> Iterator[bytes]:
    """The same ones each time: words that matter, in any order, in a text that may be long."""
    draw = random.Random(7)
    words = [
        '"shape"',
        ":",
        "[",
        "]",
        ",",
        "1",
        "99999",
        " ",
        "\n",
        "\\u00",
        "6",
        "\\",
        '"',
        "{",
        "}",
        "-",
        "1e9",
        "é",
        "x" * 400,
    ]
    for _ in range(count):
        text = "".join(draw.choice(words) for _ in range(draw.randrange(1, 60)))
        yield text.encode() + (b" " * 4096 if draw.random() < 0.3 else b"")


def messages(good: bytes) -> Iterator[bytes]:
    yield from (b"", good, b"\x0a", b"\x0a\x05ab", b"\x2a\x03\x1a\x01\x01", b"\x2a\x05\x1a\x03\xff\xff\x7f")
    for name in (b"", MODEL.encode(), b"A", b"a,b", b"x" * 64, b"\xff"):
        yield b"\x0a" + bytes([len(name)]) + name
    for version in (b"", b"1", b"01", b"x", b"9" * 20):
        yield good + b"\x12" + bytes([len(version)]) + version
    for tail in (
        b"\x08\x01",
        b"\x0b",
        b"\x28\x01",
        b"\x2a\x02\x18\x01",
        b"\x2a\x0b\x18" + b"\xff" * 9 + b"\x01",
    ):
        yield good + tail
    draw = random.Random(7)
    for _ in range(150):
        changed = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield bytes(changed)


def built_by_ziglang(folder: Path) -> Path:
    """The request filter; the other two libraries are built as well, to see that they can be."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    os.environ["PATH"] = ""
    compiler = obtain_compiler(folder)
    assert compiler.cache is not None, compiler
    library = folder / "filter.so"
    build_request_filter(compiler, library)
    build_cancel_guard(compiler, folder / "guard.so")
    (runtime,) = find_triton().python_folder.parent.glob("lib/python3.*/site-packages/onnxruntime")
    onnx_backend.build(compiler, folder / "backends", runtime)
    return library


def compare_http(ports: tuple[int, int]) -> tuple[int, list[str]]:
    asked = [*web_cases(), *((INFER, body, {}) for body in random_bodies(300))]
    wrong, statuses = [], set()
    with ExitStack() as exits:
        wires = [
            exits.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port))) for port in ports
        ]
        for path, body, headers in asked:
            one, other = (post(wire, path, body, headers) for wire in wires)
            statuses.add(one[0])
            if one != other:
                wrong.append(f"{path} {body[:200]!r} {headers}: {one} and {other}")
    assert {200, 400} <= statuses
    return len(asked), wrong


def compare_grpc(ports: tuple[int, int]) -> tuple[int, list[str]]:
    asked = [
        (method, message) for message in messages(good_frame()[5:]) for method in ("ModelInfer", "ModelReady")
    ]
    wrong, statuses = [], set()
    with ExitStack() as exits:
        wires = [exits.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for port in ports]
        for method, message in asked:
            one, other = (call(wire, method, message) for wire in wires)
            statuses.add(one[0])
            if one != other:
                wrong.append(f"{method} {message!r}: {one} and {other}")
    assert {"INVALID_ARGUMENT", "UNAVAILABLE"} <= statuses
    return len(asked), wrong


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="serin-zig-") as scratch:
        library = built_by_ziglang(Path(scratch) / "environment")
        with echoing() as ours, echoing(library) as theirs:
            found = [compare((ours, theirs)) for compare in (compare_http, compare_grpc)]
    wrong = [text for _, texts in found for text in texts]
    print(f"requests={sum(count for count, _ in found)} wrong={len(wrong)}")
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
