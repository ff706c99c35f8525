"""The gateway's compiled reader of messages in a program under AddressSanitizer and UBSan (request_filter.cc)."""

import subprocess
from pathlib import Path

from serin.errors import TritonInstallFailed
from serin.serving.native.compiler import machine_compiler
from serin.serving.native.request_filter import SOURCES

SANITIZED = ("-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build_reader(program: Path) -> None:
    """TritonInstallFailed where there is no compiler, or none with sanitizers."""
    source = Path(__file__).with_name("request_filter.cc")
    compiler = machine_compiler()
    if compiler is None:
        raise TritonInstallFailed(step="compiling the reader", reason="no C++ compiler is on PATH")
    command = [*compiler.command, *SANITIZED, f"-I{SOURCES}", "-o", str(program), str(source)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode and "asan" in made.stderr:
        raise TritonInstallFailed(step="compiling the reader", reason="the compiler has no sanitizers here")
    assert made.returncode == 0, made.stderr


def run_reader(program: Path, packed: bytes) -> list[tuple[str, str, str, str]]:
    """Of each text: what is wrong with it as JSON; what is read in it as a ModelInferRequest, a ModelReadyRequest; the
    JSON with its nulls written out."""
    done = subprocess.run(
        [program], input=packed, capture_output=True, env={"ASAN_OPTIONS": "detect_leaks=0"}
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    lines = done.stdout.decode().split("\n")[:-1]
    return list(zip(*(lines[place::4] for place in range(4)), strict=True))
