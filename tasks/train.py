"""A dataset to trained weights, on leased GPUs; taken up where an earlier run of the same stopped."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin import environment
from serin.artifacts import Checkpoint, Dataset
from serin.leases import lease
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.stage_results import find_result, keep_result, one_at_a_time
from serin.training import launch
from serin.training.place import devices_wanted, training_folder, training_key
from tasks.markdown import receipt_table, table
from tasks.retry import error_is_retryable
from tasks.run_log import following, rank_line, thinned

Say = Callable[[str], None]


@task(
    task_run_name="train_model {name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def train_model(
    model: ModelSpec, training: TrainingSpec, dataset: Dataset, *, name: str, fresh: bool = False
) -> Checkpoint:
    """Trained weights; found when they were trained before, unless `fresh`."""
    folder = training_folder(
        environment.home(), model, training, dataset, attempt=str(flow_run.id) if fresh else None
    )
    say, stop = get_run_logger().info, threading.Event()
    try:
        checkpoint, page = await asyncio.to_thread(
            _train, model, training, dataset, folder, name, fresh, stop, say
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
    return found if found is not None and Path(found.path).is_dir() else None


def _train(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    folder: Path,
    name: str,
    fresh: bool,
    stop: threading.Event,
    say: Say,
) -> tuple[Checkpoint, str | None]:
    """The weights, and a page about them when they are new."""
    home = environment.home()
    with one_at_a_time(home, "train", folder.name, stop=stop, say=say):
        found = None if fresh else find_checkpoint(model, training, dataset)
        if found is not None:
            say(f"trained before: {found.path}")
            return found, None
        with lease(
            devices_wanted(model, training), home=home, purpose=f"training of {name}", say=say
        ) as held:
            logs = folder / "logs"
            with (
                thinned(say) as less,
                following(lambda: logs.glob("attempt-*.log"), less, label=rank_line),
            ):
                checkpoint = launch.train(
                    model, training, dataset, folder=folder, devices=held.ids, stop=stop, say=less
                )
        keep_result(home, "train", training_key(model, training, dataset), checkpoint)
    return checkpoint, _page(folder, checkpoint)


def _page(folder: Path, checkpoint: Checkpoint) -> str:
    measured = json.loads((Path(checkpoint.path) / "metrics.json").read_text())
    parts = [
        f"# Training\n\nThe best weights are those of step {checkpoint.step:,}, in `{checkpoint.path}`.\n"
    ]
    parts.append(table(("metric", "value"), sorted(checkpoint.metrics.items())))
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
