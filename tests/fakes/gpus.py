"""GPUs that are pretended: an inventory file, which stands in for the driver."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest


def write_inventory(folder: Path, ids: Sequence[str], *, memory_bytes: int = 1 << 30) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    devices = [{"id": name, "name": "Stand-in", "memory_bytes": memory_bytes} for name in ids]
    file = folder / "inventory.json"
    file.write_text(json.dumps({"format": "serin.inventory", "version": 1, "devices": devices}))
    return file


def pretend_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, ids: Sequence[str]) -> None:
    """For this process and its children."""
    monkeypatch.setenv("SERIN_INVENTORY", str(write_inventory(folder, ids)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
