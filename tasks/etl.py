"""Prefect's task for the ETL, and the page about a new dataset."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.formats.dataset import read_dataset
from serin.pipeline import etl as use_case
from serin.pipeline.stage import StageResult
from serin.reports.charts import Bar, bars
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.spec.names import Priority
from serin.store.artifacts import Dataset
from serin.store.receipt import Receipt
from tasks.in_thread import in_thread
from tasks.markdown import drawing, receipt_table, table
from tasks.retry import error_is_retryable

_WHY = {
    "no_partner": "without a match in a join",
    "null_target": "without a target",
    "null_time": "without a time",
}


@task(
    task_run_name="build_dataset {name}",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def build_dataset(
    data: DataSpec,
    features: tuple[FeatureSpec, ...],
    etl: EtlSpec,
    *,
    name: str,
    priority: Priority = "normal",
    fresh: bool = False,
    attempt: str | None = None,
) -> Dataset:
    """Returns the dataset that the spec describes, published in the store; finds an existing one, unless `fresh`.

    A fresh build finds the one that the same `attempt` (this run, when none is named) has made.
    """
    run = str(flow_run.id)
    done: StageResult[Dataset] = await in_thread(
        use_case.build_dataset,
        data,
        features,
        etl,
        name=name,
        priority=priority,
        fresh=fresh,
        attempt=attempt or run,
        run=run,
    )
    if done.ran:
        await acreate_markdown_artifact(
            key=f"{name}-data", markdown=_page(done.value, done.receipt), description=f"The dataset of {name}"
        )
    return done.value


def _page(dataset: Dataset, receipt: Receipt | None) -> str:
    found = read_dataset(dataset.path)
    splits = table(
        ("split", "rows", "parts"), [(s, split.rows, split.parts) for s, split in found.splits.items()]
    )
    features = table(
        ("feature", "kind", "codes"),
        [(column, "numeric", "") for column in found.numeric]
        + [(column.name, "categorical", column.size) for column in found.categorical],
    )
    left_out = [(_WHY.get(reason, reason), rows) for reason, rows in found.dropped.items() if rows]
    dropped = table(("rows left out", "rows"), left_out) if left_out else ""
    sources = table(
        ("table", "file", "bytes"), [(file.table, file.path, file.size) for file in found.sources]
    )
    rows = [Bar(label=name, value=split.rows, text=f"{split.rows:,}") for name, split in found.splits.items()]
    parts = [
        f"# Dataset {dataset.digest[:12]}\n\nTarget `{found.target}` ({found.task}), in `{dataset.path}`.\n",
        drawing(bars(rows).standalone(), "Rows"),
        splits,
        dropped,
        f"## Features\n\n{features}",
        f"## Sources\n\n{sources}",
        f"## Cost\n\n{receipt_table(receipt.to_json())}" if receipt else "",
    ]
    return "\n".join(part for part in parts if part)
