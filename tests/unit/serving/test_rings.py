"""How large the rings are in which the gateway records requests."""

from pathlib import Path

import pytest

from serin.serving.envoy.rings import ring_settings


def test_rings_take_a_quarter_of_the_memory_that_is_free_and_no_crumbs(tmp_path: Path) -> None:
    class Place:
        f_frsize = 1 << 20
        f_bavail = 0

    sizes = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serin.serving.envoy.rings.os.statvfs", lambda _: Place)
        for Place.f_bavail in (4096, 64, 8, 7):
            sizes[Place.f_bavail] = ring_settings(tmp_path / "rings", 2)
    page = 4096
    assert sizes == {
        4096: f"{(64 << 20) - page} {tmp_path / 'rings'}",
        64: f"{(8 << 20) - page} {tmp_path / 'rings'}",
        8: f"{(1 << 20) - page} {tmp_path / 'rings'}",
        7: "",
    }
