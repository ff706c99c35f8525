"""Prefect's task for training, and the page about new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.pipeline import train as use_case
from serin.pipeline.stage import StageResult
from serin.reports.charts import curves
from serin.spec.model import ModelSpec
from serin.spec.names import Priority
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.receipt import Receipt
from serin.training.launch.progress import progress_file
from tasks.in_thread import in_thread
from tasks.markdown import drawing, receipt_table, table
from tasks.retry import error_is_retryable

_POINTS = 300  # of a curve: more would not be visible


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
    priority: Priority = "normal",
    fresh: bool = False,
    attempt: str | None = None,
) -> Checkpoint:
    """Returns trained weights; finds existing ones, unless `fresh`.

    A fresh training continues what the same `attempt` (this run, when none is named) has done of it.
    """
    run = str(flow_run.id)
    done: StageResult[Checkpoint] = await in_thread(
        use_case.train_model,
        model,
        training,
        dataset,
        name=name,
        priority=priority,
        fresh=fresh,
        attempt=attempt or run,
        run=run,
    )
    if done.ran:
        await acreate_markdown_artifact(
            key=f"{name}-training",
            markdown=_page(done.value, done.receipt),
            description=f"The training of {name}",
        )
    return done.value


def _page(checkpoint: Checkpoint, receipt: Receipt | None) -> str:
    folder = Path(checkpoint.path).parent
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
    if receipt is not None:
        parts.append(f"## Cost of the last attempt\n\n{receipt_table(receipt.to_json())}")
    return "\n".join(parts)


def _curves(folder: Path, epochs: list[dict[str, Any]]) -> str:
    """Returns the loss that the workers reported, and the metrics after each epoch."""
    if not epochs:
        return ""
    said = progress_file(folder)
    lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    losses = {
        line["step"]: line["loss"] for line in lines if line["event"] == "step"
    }  # of a resumed epoch the last record counts
    losses = losses or {epoch["step"]: epoch["loss"] for epoch in epochs}
    every = max(1, len(losses) // _POINTS)
    panels = {"loss": sorted(losses.items())[::every]}
    for name in sorted({name for epoch in epochs for name in epoch["metrics"]}):
        panels[name] = [
            (epoch["step"], epoch["metrics"][name]) for epoch in epochs if name in epoch["metrics"]
        ]
    return curves(panels, "steps").standalone()
