"""One stage at a time, without an orchestrator. A stage finds what an earlier call has done already."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serin.errors import NotTrained, Preempted, TrainingRefused
from serin.machine import environment
from serin.machine.leases import lease
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import NO_DATASET, Bundle, Checkpoint, Dataset
from serin.store.runs import hold_run_of
from serin.store.stage_results import find_result, keep_result, one_at_a_time
from serin.store.store import Store
from serin.training.launch.run_dir import (
    devices_wanted,
    refuse_changed_code,
    training_folder,
    training_key,
    training_parts,
)

if TYPE_CHECKING:
    from serin.etl.sources.layout import Layout
    from serin.training.launch.machines import Machines

Say = Callable[[str], None]


def look_at_tables(spec: PipelineSpec) -> Layout:
    """The spec held against its tables' real columns; DataError or SpecError for what does not fit."""
    from serin.etl.sources.file_cache import FileCache
    from serin.etl.sources.files import find_files
    from serin.etl.sources.layout import lay_out
    from serin.etl.sources.tables import open_table

    with (
        Store.open().using_kept() as kept,  # the build that follows need not convert again
        tempfile.TemporaryDirectory(prefix="serin-check-") as scratch,
    ):
        converted = FileCache.converted(kept)
        tables = {
            name: open_table(name, find_files(name, path, converted.digests), Path(scratch), converted)
            for name, path in spec.data.tables.items()
        }
        return lay_out(spec.data, spec.features, tables)


def make_dataset(spec: PipelineSpec, *, fresh: bool = False, say: Say) -> Dataset:
    if not spec.has_data:
        return NO_DATASET
    from serin.etl.build import build_dataset

    return build_dataset(
        spec.data, spec.features, spec.etl, store=Store.open(), name=spec.name, fresh=fresh, say=say
    )


def train_model(spec: PipelineSpec, *, machines: Machines | None = None, say: Say) -> Checkpoint:
    """Trained weights, from where an earlier call or run stopped. GPUs are leased for the time it takes."""
    from serin.training.launch.launcher import train

    dataset, home = make_dataset(spec, say=say), environment.home()
    asked = training_parts(spec.model, spec.training, dataset)
    folder = training_folder(home, spec.model, spec.training, dataset)
    together = machines is not None and machines.count > 1  # the others do the same on purpose
    with (
        nullcontext() if together else one_at_a_time(home, "train", folder.name, say=say),
        lease(
            devices_wanted(spec.model, spec.training), home=home, purpose=f"training of {spec.name}", say=say
        ) as held,
    ):
        key = training_parts(spec.model, spec.training, dataset)
        refuse_changed_code(asked, key, folder)
        checkpoint = train(
            spec.model, spec.training, dataset, folder=folder, devices=held.ids, machines=machines, say=say
        )
        keep_result(home, "train", asked.digest, checkpoint)
    return checkpoint


def trace_training(spec: PipelineSpec, *, say: Say) -> Path:
    """A trace of a few steps, made by a training of its own that ends with it."""
    from serin.training.launch.launcher import train

    dataset, home = make_dataset(spec, say=say), environment.home()
    folder = training_folder(home, spec.model, spec.training, dataset, attempt=secrets.token_hex(4))
    traced, stop = [], threading.Event()

    def hear(record: dict[str, Any]) -> None:
        if record["event"] == "trace":
            traced.append(Path(record["path"]))
            stop.set()

    count = devices_wanted(spec.model, spec.training)
    with lease(count, home=home, purpose=f"trace of {spec.name}", say=say) as held, suppress(Preempted):
        train(
            spec.model,
            spec.training,
            dataset,
            folder=folder,
            devices=held.ids,
            stop=stop,
            test=False,
            profile=True,
            say=say,
            hear=hear,
        )
    if not traced:
        raise TrainingRefused(
            folder=folder, reason=f"a model of kind {spec.model.kind} has no steps to trace"
        )
    return traced[0]


def publish_model(spec: PipelineSpec, *, override: str | None = None, say: Say) -> Bundle:
    """A version from the weights `train_model` left; NotTrained when there are none.

    `override`: who answers for it when it is worse than the live version."""
    from serin.etl.raw_rows import read_test_rows
    from serin.export.build import export_model

    dataset, home = make_dataset(spec, say=say), environment.home()
    key = training_key(spec.model, spec.training, dataset)
    checkpoint = find_result(home, "train", key, Checkpoint)
    if checkpoint is not None:
        hold_run_of(home, Path(checkpoint.path))
    if checkpoint is None or not Path(checkpoint.path).is_dir():
        raise NotTrained(spec=spec.name)
    lineage = {"training": Path(checkpoint.path).parent.name}
    return export_model(
        spec,
        checkpoint,
        dataset,
        store=Store.open(),
        lineage=lineage,
        read_rows=lambda features, most: read_test_rows(spec.data, features, dataset, max_rows=most, say=say),
        override=override,
        say=say,
    )
