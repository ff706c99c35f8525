"""Locates a pruned network beside the one it was cut from. Does not import torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from serin.machine.durable import sync
from serin.training.launch.job import result_folder

PRUNED = "pruned"


def pruned_run(folder: Path) -> Path:
    """Returns the run folder in which the pruned network is trained further."""
    return folder / PRUNED


def start_folder(folder: Path) -> Path:
    """Returns the folder of weights with which a run begins instead of random ones."""
    return start_of(pruned_run(folder))


def start_of(run: Path) -> Path:
    return run / "start"


def is_published(folder: Path) -> bool:
    return (result_folder(folder) / PRUNED).exists()


def publish_pruned(folder: Path) -> None:
    """Publishes `result/pruned/`, the result of the second run, completely or not at all."""
    result = result_folder(folder)
    scratch = result / f".{PRUNED}"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(result_folder(pruned_run(folder)), scratch)
    scratch.rename(result / PRUNED)
    sync(result)
