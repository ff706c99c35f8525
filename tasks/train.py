"""A dataset to trained weights, on leased GPUs; taken up where an earlier run of the same stopped."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.machine import environment
from serin.machine.leases import lease
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.runs import hold_run_of
from serin.store.stage_keys import note, remember, why
from serin.store.stage_results import find_result, keep_result, one_at_a_time
from serin.store.store import Store
from serin.training.launch import launcher
from serin.training.launch.progress import progress_file
from serin.training.launch.run_dir import (
    devices_wanted,
    refuse_changed_code,
    training_folder,
    training_key,
    training_parts,
)
from tasks.markdown import drawing, receipt_table, table
from tasks.pictures import curves
from tasks.retry import error_is_retryable
from tasks.run_log import following, rank_line, thinned

Say = Callable[[str], None]

_POINTS = 300  # of a curve: more cannot be seen


@task(
    task_run_name="train_model {name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def train_model(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    *,
    name: str,
    fresh: bool = False,
    attempt: str | None = None,
) -> Checkpoint:
    """Trained weights; found when they were trained before, unless `fresh`. A fresh training goes on with what the
    same `attempt` (this run, when none is named) has done of it."""
    apart = (attempt or str(flow_run.id)) if fresh else None
    folder = training_folder(environment.home(), model, training, dataset, attempt=apart)
    say, stop = get_run_logger().info, threading.Event()
    try:
        checkpoint, page = await asyncio.to_thread(
            _train, model, training, dataset, folder, name, fresh, stop, str(flow_run.id), say
        )
    finally:
        stop.set()  # when this run is cancelled, the training saves and ends; after its end it means nothing
    if page is not None:
        await acreate_markdown_artifact(
            key=f"{name}-training", markdown=page, description=f"The training of {name}"
        )
    return checkpoint


def find_checkpoint(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> Checkpoint | None:
    """Weights that were trained before from the same dataset in the same way, when they are still there."""
    found = find_result(environment.home(), "train", training_key(model, training, dataset), Checkpoint)
    if found is None:
        return None
    hold_run_of(environment.home(), Path(found.path))
    return found if Path(found.path).is_dir() else None


def _train(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    folder: Path,
    name: str,
    fresh: bool,
    stop: threading.Event,
    run: str,
    say: Say,
) -> tuple[Checkpoint, str | None]:
    """The weights, and a page about them when they are new."""
    home, key = environment.home(), training_parts(model, training, dataset)
    Store.open().hold_dataset(dataset)
    with one_at_a_time(home, "train", folder.name, stop=stop, say=say):
        found = None if fresh else find_checkpoint(model, training, dataset)
        if found is not None:
            reason = f"trained before: {found.path}"
            say(reason)
            note(home, run, "train", ran=False, why=reason)
            return found, None
        reason = why(home, name, key, fresh=fresh)
        say(f"it is trained: {reason}")
        note(home, run, "train", ran=True, why=reason)
        wanted = devices_wanted(model, training)
        with lease(wanted, home=home, purpose=f"training of {name}", stop=stop, say=say) as held:
            refuse_changed_code(key, training_parts(model, training, dataset), folder)
            logs = folder / "logs"
            with (
                thinned(say) as less,
                following(lambda: logs.glob("attempt-*.log"), less, label=rank_line),
            ):
                checkpoint = launcher.train(
                    model, training, dataset, folder=folder, devices=held.ids, stop=stop, say=less
                )
        keep_result(home, "train", key.digest, checkpoint)
        remember(home, name, key)
    return checkpoint, _page(folder, checkpoint)


def _page(folder: Path, checkpoint: Checkpoint) -> str:
    measured = json.loads((Path(checkpoint.path) / "metrics.json").read_text())
    parts = [
        f"# Training\n\nThe best weights are those of step {checkpoint.step:,}, in `{checkpoint.path}`.\n"
    ]
    parts.append(table(("metric", "value"), sorted(checkpoint.metrics.items())))
    parts.append(drawing(_curves(folder, measured["epochs"]), "Loss and metrics by step"))
    parts.append("## Epochs\n")
    names = sorted({name for epoch in measured["epochs"] for name in epoch["metrics"]})
    rows = [
        (epoch["epoch"], epoch["step"], epoch["loss"], *(epoch["metrics"].get(name, "") for name in names))
        for epoch in measured["epochs"]
    ]
    parts.append(table(("epoch", "steps done", "loss", *names), rows))
    receipt = folder / "receipt.json"
    if receipt.exists():
        parts.append(f"## Cost of the last attempt\n\n{receipt_table(json.loads(receipt.read_text()))}")
    return "\n".join(parts)


def _curves(folder: Path, epochs: list[dict[str, Any]]) -> str:
    """The loss as the workers told it, and what was measured after each epoch."""
    if not epochs:
        return ""
    said = progress_file(folder)
    lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    losses = {
        line["step"]: line["loss"] for line in lines if line["event"] == "step"
    }  # a resumed one: the last word
    losses = losses or {epoch["step"]: epoch["loss"] for epoch in epochs}
    every = max(1, len(losses) // _POINTS)
    panels = {"loss": sorted(losses.items())[::every]}
    for name in sorted({name for epoch in epochs for name in epoch["metrics"]}):
        panels[name] = [
            (epoch["step"], epoch["metrics"][name]) for epoch in epochs if name in epoch["metrics"]
        ]
    return curves(panels, "steps")
