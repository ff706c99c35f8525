"""Better settings for a spec, found by trying on leased GPUs, from where an earlier call stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from serin.machine import environment
from serin.pipeline.experiments import keep_study
from serin.spec.pipeline import PipelineSpec
from serin.spec.search import with_values
from serin.store.artifacts import Dataset
from serin.store.runs import name_model, run_folder
from serin.training.search.search import SearchResult, search, search_key

CHOSEN = "chosen.yaml"
"""In the search's folder: the spec with the best settings."""


def search_settings(
    spec: PipelineSpec, datasets: Sequence[Dataset], *, stop: threading.Event | None = None
) -> SearchResult:
    """The best settings by the valid rows of `datasets`, the folds. Each trial leases its GPUs and has its receipt; a
    trial that was done before is not repeated."""
    assert spec.search is not None
    home = environment.home()
    key = search_key(spec.model, spec.training, spec.search, datasets)
    folder = run_folder(home, f"search-{key}")
    name_model(folder, spec.name)
    try:
        found = search(
            spec.model,
            spec.training,
            spec.search,
            datasets,
            folder=folder,
            home=home,
            storage=environment.text("SERIN_SEARCH_STORAGE"),
            priority=spec.priority,
            stop=stop,
        )
    finally:
        keep_study(folder)
    model, training = with_values(spec.model, spec.training, found.settings)
    chosen = spec.model_copy(update={"model": model, "training": training}).to_yaml()
    (Path(found.folder) / CHOSEN).write_text(chosen, encoding="utf-8")
    return found
