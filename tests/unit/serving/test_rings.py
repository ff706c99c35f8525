"""The gateway's rings: how large they are, where there are none, and one that is read while it is written."""

import subprocess
from pathlib import Path

import pytest

from serin.serving.envoy.rings import ring_settings
from serin.serving.native.compiler import machine_compiler
from serin.serving.native.request_filter import SOURCES

MIB = 1 << 20
PLENTY = 1 << 40
MEMORY = Path("/dev/shm")


@pytest.mark.parametrize(
    ("free_mib", "memory_mib", "ring_mib"),
    [
        (4096, 1 << 20, 64),
        (64, 1 << 20, 8),
        (4096, 512, 16),
        (8, 1 << 20, 1),
        (7, 1 << 20, None),
        (4096, 31, None),
    ],
)
def test_rings_take_little_of_the_memory_and_no_crumbs(
    free_mib: int, memory_mib: int, ring_mib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Place:
        f_frsize, f_bavail = MIB, free_mib

    monkeypatch.setattr("serin.serving.envoy.rings.os.statvfs", lambda _: Place)
    wanted = f"{ring_mib * MIB - 4096} {MEMORY / 'rings'}" if ring_mib else ""
    assert ring_settings(MEMORY / "rings", 2, memory_mib * MIB) == wanted


def test_there_are_none_outside_of_memory() -> None:
    assert ring_settings(Path("/proc/self"), 2, PLENTY) == ""
    assert ring_settings(Path(__file__), 2, PLENTY) == ""


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_every_request_is_read_once_as_it_was_written_or_counted_as_lost(
    tmp_path: Path, sanitizer: str
) -> None:
    compiler = machine_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler is on PATH")
    program, source = tmp_path / "stress", Path(__file__).with_name("ring_stress.cc")
    flags = ("-std=c++17", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread")
    made = subprocess.run(
        [*compiler.command, *flags, f"-I{SOURCES}", "-o", program, source], capture_output=True, text=True
    )
    if made.returncode and "san" in made.stderr and "error:" not in made.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program, tmp_path, "5000", str(1 << 16)], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address space is not one that the sanitizer knows")
    assert done.returncode == 0, done.stderr[-3000:]
    read, full, large, fillers = map(int, done.stdout.split())
    assert read + full + large == 5000
    assert min(read, full, large, fillers) > 0
