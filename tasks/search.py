"""Prefect's task for the search, and the page about all trials."""

from __future__ import annotations

import json
from pathlib import Path

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from serin.pipeline import search as use_case
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Dataset
from serin.training.search.search import SearchResult
from tasks.in_thread import in_thread
from tasks.markdown import drawing, table
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
    """Returns the best settings by the valid rows, with a page about all trials; `chosen.yaml` is in its folder."""
    found: SearchResult = await in_thread(use_case.search_settings, spec, datasets)
    await acreate_markdown_artifact(
        key=f"{spec.name}-search",
        markdown=_page(Path(found.folder)),
        description=f"The search for {spec.name}",
    )
    return found


def _page(folder: Path) -> str:
    chosen = (folder / use_case.CHOSEN).read_text(encoding="utf-8")
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
            drawing((folder / "importance.svg").read_text(encoding="utf-8"), "Importance of settings"),
            "## Trials\n",
            table(("trial", "state", "metrics", "settings"), rows),
            f"## The spec\n\n```yaml\n{chosen}```\n",
        ]
    )
