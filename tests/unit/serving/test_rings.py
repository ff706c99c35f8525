"""How large the rings are in which the gateway records requests, and where there are none."""

from pathlib import Path

import pytest

from serin.serving.envoy.rings import ring_settings

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
