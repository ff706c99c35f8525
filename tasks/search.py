"""Better settings for a spec, found by trying on leased GPUs; taken up where an earlier run of the same stopped."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from serin.machine import environment
from serin.spec.pipeline import PipelineSpec
from serin.spec.search import with_values
from serin.store.artifacts import Dataset
from serin.store.runs import run_folder
from serin.training.search.search import SearchResult, search, search_key
from tasks.markdown import picture, table
from tasks.retry import error_is_retryable

_SHOWN = 20


@task(
    task_run_name="search_settings {spec.name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def search_settings(spec: PipelineSpec, datasets: list[Dataset]) -> SearchResult:
    """The best settings by the valid rows, with a page about all that was tried; `chosen.yaml` in its folder."""
    assert spec.search is not None
    key = search_key(spec.model, spec.training, spec.search, datasets)
    home, stop = environment.home(), threading.Event()
    folder = run_folder(home, f"search-{key}", create=True)
    try:
        found = await asyncio.to_thread(
            search,
            spec.model,
            spec.training,
            spec.search,
            datasets,
            folder=folder,
            home=home,
            storage=environment.search_storage(),
            stop=stop,
            say=get_run_logger().info,
        )
    finally:
        stop.set()  # when this run is cancelled, the trials save and end; after their end it means nothing
    model, training = with_values(spec.model, spec.training, found.settings)
    chosen = spec.model_copy(update={"model": model, "training": training}).to_yaml()
    (folder / "chosen.yaml").write_text(chosen, encoding="utf-8")
    await acreate_markdown_artifact(
        key=f"{spec.name}-search", markdown=_page(folder, chosen), description=f"The search for {spec.name}"
    )
    return found


def _page(folder: Path, chosen: str) -> str:
    result = json.loads((folder / "result.json").read_text())
    order = sorted(result["trials"], key=lambda trial: trial["trial"] != result["trial"])[:_SHOWN]
    rows = [
        (trial["trial"], trial["state"], json.dumps(trial["metrics"]), json.dumps(trial["settings"]))
        for trial in order
    ]
    return "\n".join(
        [
            f"# Search\n\nThe best of {len(result['trials'])} trials by the valid rows is trial {result['trial']}.\n",
            table(
                ("setting", "chosen"),
                [(path, json.dumps(value)) for path, value in result["settings"].items()],
            ),
            picture((folder / "importance.png").read_bytes(), "What decided"),
            "## Trials\n",
            table(("trial", "state", "metrics", "settings"), rows),
            f"## The spec\n\n```yaml\n{chosen}```\n",
        ]
    )
