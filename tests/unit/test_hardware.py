"""Which GPUs are here, by the file that stands in for the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from serin.errors import SpecError
from serin.machine.hardware import Device, inventory
from tests.fakes.gpus import pretend_gpus


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    return tmp_path


def test_the_inventory_file_stands_in_for_the_driver(home: Path) -> None:
    assert inventory()[0] == Device(id="GPU-a", name="Stand-in", memory_bytes=1 << 30)


def test_what_a_scheduler_did_not_give_us_is_not_in_the_inventory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [device.id for device in inventory()] == ["GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [device.id for device in inventory()] == ["GPU-b", "GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inventory() == ()


def test_an_inventory_file_that_is_none_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_INVENTORY", str(tmp_path / "absent.json"))
    with pytest.raises(SpecError, match=r"absent\.json"):
        inventory()


def test_a_device_id_cannot_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["../../etc/x"])
    with pytest.raises(SpecError, match="is not a device id"):
        inventory()
