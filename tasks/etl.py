"""Raw tables to a dataset. A dataset that was made from the same tables by the same rules is found, not made again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.formats.dataset import read_dataset
from serin.machine import environment
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import NO_DATASET, Dataset
from serin.store.receipt import Receipt, measure
from serin.store.stage_keys import note, remember, why
from serin.store.stage_results import find_result, keep_result
from serin.store.store import Store
from tasks.markdown import drawing, receipt_table, table
from tasks.needs import etl_needs, leased
from tasks.pictures import bars
from tasks.retry import error_is_retryable
from tasks.run_log import dask_warnings, thinned, until_stopped

Say = Callable[[str], None]

_WHY = {
    "no_partner": "without a partner in a join",
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
    fresh: bool = False,
    attempt: str | None = None,
) -> Dataset:
    """The dataset the spec describes, published in the store; found when it was made before, unless `fresh`: then the
    one that the same `attempt` (this run, when none is named) has made."""
    stop = threading.Event()
    apart = (attempt or str(flow_run.id)) if fresh else None
    try:
        dataset, page = await asyncio.to_thread(
            _build, data, features, etl, name, apart, str(flow_run.id), stop, get_run_logger().info
        )
    finally:
        stop.set()  # when this run is cancelled; after its end it means nothing
    if page is not None:
        await acreate_markdown_artifact(
            key=f"{name}-data", markdown=page, description=f"The dataset of {name}"
        )
    return dataset


def _build(
    data: DataSpec,
    features: tuple[FeatureSpec, ...],
    etl: EtlSpec,
    name: str,
    attempt: str | None,
    run: str,
    stop: threading.Event,
    say: Say,
) -> tuple[Dataset, str | None]:
    """The dataset, and a page about it when it is new."""
    found = find_dataset(data, features, say) if attempt is None else _made_by(attempt, data)
    if found == NO_DATASET:
        return found, None
    if found is not None:
        reason = f"made before: dataset {found.digest[:12]} in {found.path}"
        say(reason)
        note(environment.home(), run, "etl", ran=False, why=reason)
        return found, None
    from serin.etl import build  # pandas and Dask: not for a run that only looks

    home, key = environment.home(), build.dataset_parts(data, features, Store.open())
    reason = why(home, name, key, fresh=attempt is not None)
    say(f"the dataset is made: {reason}")
    note(home, run, "etl", ran=True, why=reason)
    with (
        leased(etl_needs(data, etl), home=home, purpose=f"dataset of {name}", stop=stop, say=say) as held,
        environment.showing_devices(held.ids),
        measure("etl") as measurement,
        thinned(say) as less,
        dask_warnings(less),
    ):
        speak = until_stopped(less, stop, stage="etl")
        dataset = build.build_dataset(
            data, features, etl, store=Store.open(), name=name, fresh=attempt is not None, say=speak
        )
        measurement.rows = sum(dataset.rows.values())
    remember(home, name, key)
    if attempt is not None:
        keep_result(home, "etl", attempt, dataset)
    return dataset, _page(dataset, measurement.receipt)


def find_dataset(data: DataSpec, features: tuple[FeatureSpec, ...], say: Say | None = None) -> Dataset | None:
    """The dataset that was made from the same files by the same rules, when there is one. It must still be fresh."""
    if not data.tables:
        return NO_DATASET
    from serin.etl import build

    return build.find_dataset(data, features, Store.open(), say or build.silent)


def _made_by(attempt: str, data: DataSpec) -> Dataset | None:
    """What a fresh build has given, when the run that asked for it was interrupted after it and goes on."""
    if not data.tables:
        return NO_DATASET
    found = find_result(environment.home(), "etl", attempt, Dataset)
    return found if found is not None and Path(found.path).is_dir() else None


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
    parts = [
        f"# Dataset {dataset.digest[:12]}\n\nTarget `{found.target}` ({found.task}), in `{dataset.path}`.\n",
        drawing(
            bars([(name, split.rows, f"{split.rows:,}") for name, split in found.splits.items()]), "Rows"
        ),
        splits,
        dropped,
        f"## Features\n\n{features}",
        f"## Sources\n\n{sources}",
        f"## Cost\n\n{receipt_table(receipt.to_json())}" if receipt else "",
    ]
    return "\n".join(part for part in parts if part)
