"""What an older Serin stored, with the spec's former keys, is refused with advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serin.errors import FormatOutdated
from serin.formats.bundle import read_manifest
from serin.formats.trained import read_record
from serin.store.store import Store
from serin.training.launch.job import read_job

MANIFEST = {
    "format": "serin.bundle", "version": 1, "name": "parcels", "model_version": 1, "spec_digest": "0" * 64,
    "lineage": {}, "metrics": {}, "files": {},
}  # fmt: skip
MODEL = {
    "format": "serin.weights", "version": 1, "model": {"kind": "mlp", "members": 2}, "task": "binary",
    "shape": {"numeric": 1, "sizes": [], "outputs": 1}, "file": "weights.safetensors", "weights_sha256": "0" * 64,
}  # fmt: skip
TRAINING = {
    "format": "serin.training", "version": 1, "model": {"kind": "mlp"}, "training": {"step": "captured"},
    "dataset": "/data", "dataset_digest": "0" * 64, "processes": 1, "gpu": False,
}  # fmt: skip


def written(folder: Path, name: str, document: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(document))
    return folder


def test_an_older_bundle_must_be_exported_again(tmp_path: Path) -> None:
    folder = written(tmp_path, "manifest.json", MANIFEST)
    with pytest.raises(FormatOutdated, match=r"version 1 .* reads version 2.*export the model again"):
        read_manifest(folder)


def test_the_store_hands_out_no_older_bundle(tmp_path: Path) -> None:
    written(tmp_path / "models" / "parcels" / "versions" / "1", "manifest.json", MANIFEST)
    with pytest.raises(FormatOutdated, match="export the model again"):
        Store(str(tmp_path)).bundle("parcels", 1)


def test_an_older_result_of_a_training_must_be_trained_again(tmp_path: Path) -> None:
    with pytest.raises(FormatOutdated, match="train the model again"):
        read_record(written(tmp_path, "model.json", MODEL))


def test_an_older_training_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(FormatOutdated, match="remove the folder, or train in another one"):
        read_job(written(tmp_path, "training.json", TRAINING))
