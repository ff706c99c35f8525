"""One stage at a time, without an orchestrator. A stage finds what an earlier call has done already."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from serin import environment
from serin.artifacts import Bundle, Checkpoint, Dataset
from serin.errors import NotTrained
from serin.hardware import inventory, lease
from serin.receipt import measure
from serin.runs import run_folder
from serin.spec.pipeline import PipelineSpec
from serin.store import Store

if TYPE_CHECKING:
    from serin.etl.layout import Layout

Say = Callable[[str], None]


def look_at_tables(spec: PipelineSpec) -> Layout:
    """The spec held against its tables' real columns; DataError or SpecError for what does not fit."""
    from serin.etl.layout import lay_out
    from serin.etl.sources import find_files
    from serin.etl.tables import open_table

    with tempfile.TemporaryDirectory(prefix="serin-check-") as scratch:
        tables = {
            name: open_table(name, find_files(name, path), Path(scratch))
            for name, path in spec.data.tables.items()
        }
        return lay_out(spec.data, spec.features, tables)


def make_dataset(spec: PipelineSpec, *, say: Say) -> Dataset:
    from serin.etl.build import build_dataset

    folder = _run(spec)
    with measure("etl") as measurement:
        dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store.open(), say=say)
        measurement.rows = sum(dataset.rows.values())
    assert measurement.receipt is not None
    measurement.receipt.write(folder / "etl.json")
    return dataset


def train_model(spec: PipelineSpec, *, say: Say) -> Checkpoint:
    """Trained weights, from where an earlier call stopped. GPUs are leased for the time it takes."""
    from serin.training.launch import train

    dataset = make_dataset(spec, say=say)
    devices = len(inventory())
    wanted = devices if spec.training.processes == "auto" else min(spec.training.processes, devices)
    with lease(wanted, home=environment.home(), purpose=f"training of {spec.name}", say=say) as held:
        folder = _run(spec) / "training"
        return train(spec.model, spec.training, dataset, folder=folder, devices=held.ids, say=say)


def publish_model(spec: PipelineSpec, *, say: Say) -> Bundle:
    """A version from the weights `train_model` left; NotTrained when there are none."""
    from serin.export.build import export_model
    from serin.training.job import result_folder
    from serin.training.launch import train

    folder = _run(spec)
    if not result_folder(folder / "training").exists():
        raise NotTrained(spec=spec.name)
    dataset = make_dataset(spec, say=say)
    checkpoint = train(spec.model, spec.training, dataset, folder=folder / "training", say=say)
    lineage = {"run": folder.name}
    with measure("export") as measurement:
        bundle = export_model(spec, checkpoint, dataset, store=Store.open(), lineage=lineage, say=say)
    assert measurement.receipt is not None
    measurement.receipt.write(folder / "export.json")
    return bundle


def _run(spec: PipelineSpec) -> Path:
    """The run folder of everything that decides the weights: the same spec goes on where it stopped."""
    sections = spec.model_dump(mode="json", by_alias=True, include={"data", "features", "model", "training"})
    digest = hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:12]
    folder = run_folder(environment.home(), f"{spec.name}-{digest}", create=True)
    (folder / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    return folder
