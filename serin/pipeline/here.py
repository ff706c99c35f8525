"""Finds on this host what another host has made: paths in the values of stages are those of the host that made them.

Names of datasets and of trainings are digests of what decides them, so the same name is the same content everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from serin.errors import NotFound
from serin.machine import environment
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.checkpoints import fetch_checkpoint, publish_checkpoint
from serin.store.runs import hold_run_of, run_folder
from serin.store.store import Store
from serin.training.launch.job import result_folder


def dataset_here(dataset: Dataset) -> Dataset:
    """The same dataset with a path of this host, and in use until this process ends. NotFound when it is gone."""
    store = Store.open()
    alone = environment.shared_store_url() is None
    if alone or not dataset.path or (Path(dataset.path) / "dataset.json").is_file():
        store.hold_dataset(dataset)
        return dataset
    edition = Path(dataset.path).name
    found = store.dataset(edition)
    if found is None:
        raise NotFound(kind="dataset", name=edition, known=store.datasets())
    return found


def checkpoint_here(checkpoint: Checkpoint) -> Checkpoint | None:
    """The same weights with a path of this host, and in use until this process ends. None when they are gone."""
    path, home = Path(checkpoint.path), environment.home()
    hold_run_of(home, path)
    if path.is_dir():
        return checkpoint
    if environment.shared_store_url() is None:
        return None
    run = path.parent.name
    target = result_folder(run_folder(home, run, create=True))
    if not fetch_checkpoint(Store.open(), f"{run}/{target.name}", target):
        return None
    return replace(checkpoint, path=str(target))


def share_checkpoint(checkpoint: Checkpoint) -> None:
    """Copies trained weights to the store that other hosts use, where there is one."""
    if environment.shared_store_url() is not None:
        path = Path(checkpoint.path)
        publish_checkpoint(Store.open(), f"{path.parent.name}/{path.name}", path)
