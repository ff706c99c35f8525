"""The gateway's filter: what it refuses, under AddressSanitizer and UBSan; that it is made whole or not at all."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from serin.errors import TritonInstallFailed
from serin.serving import checker
from serin.serving.checker import SOURCES, build_checker, checker_place
from serin.serving.compiler import find_compiler
from tests.e2e.fuzz_requests import good_body, good_frame
from tests.unit.serving.bundles import MODEL

SANITIZED = ("-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TOO_LARGE = "an input's shape claims more elements than the request can hold"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "program"
    try:
        compiler = find_compiler()
    except TritonInstallFailed as error:
        pytest.skip(str(error))
    source = Path(__file__).with_name("request_check.cc")
    made = subprocess.run(
        [compiler, *SANITIZED, f"-I{SOURCES}", "-o", path, source], capture_output=True, text=True
    )
    if made.returncode and "asan" in made.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert made.returncode == 0, made.stderr
    return path


def judged(program: Path, texts: Sequence[bytes]) -> list[tuple[str, str, str]]:
    given = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    done = subprocess.run([program], input=given, capture_output=True, env={"ASAN_OPTIONS": "detect_leaks=0"})
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    lines = done.stdout.decode().split("\n")[:-1]
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


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
    assert [fault for fault, _, _ in judged(program, list(texts))] == list(texts.values())
    assert judged(program, [good_frame()[5:]])[0][1:] == ("", f"{len(MODEL)} 0")
    assert judged(program, [b"\x2a\x05\x1a\x03\xff\xff\x7f"])[0][1] == TOO_LARGE
    assert judged(program, [b"\x0a\x7f"])[0][1] == "the message cannot be read"


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
    assert {"", TOO_LARGE} < {fault for fault, _, _ in found}
    assert {"", "the message cannot be read"} <= {fault for _, fault, _ in found}


def test_another_envoy_gets_another_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = checker_place(tmp_path)
    monkeypatch.setattr(checker.importlib.metadata, "version", lambda _: "1.41.0")
    assert checker_place(tmp_path) != now


def test_what_envoy_does_not_take_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "filter.cc").write_text("int nothing;\n")
    monkeypatch.setattr(checker, "SOURCES", sources)
    library = tmp_path / "made" / "filter.so"
    with pytest.raises(TritonInstallFailed, match="envoy_dynamic_module_on_program_init"):
        build_checker(library)
    assert list(library.parent.iterdir()) == []
