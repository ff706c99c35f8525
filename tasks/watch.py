"""Compares what a model's clients saw with its live version's promises: a page, and an event for each breach."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict

from prefect import get_client, get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.events import emit_event

from serin.formats.reason import Reason
from serin.formats.serving.request_log import read_since
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.monitoring.latency import ReleaseLatency, summarise
from serin.monitoring.objectives import Breach, breaches
from serin.reports.latency import latency_chart
from serin.stack.wiring import request_log
from serin.store.store import Store
from tasks.markdown import drawing, table
from tasks.versions import find_version

BROKEN_PROMISE = "serin.promise.broken"
DATA_CHANGED = "serin.data.changed"
_TELL_AGAIN_S = 3600.0
_PAGES_KEPT = 288  # a day of them; a page holds a picture


@task(task_run_name="watch_model {model}", cache_policy=NO_CACHE)
async def watch_model(model: str, window_s: float) -> list[str]:
    """Returns the promises that were broken in the last `window_s` seconds, as messages."""
    logger = get_run_logger()
    now = time.time()
    log = request_log(environment.home())
    ours = [each for each in await asyncio.to_thread(read_since, log, now - window_s) if each.model == model]
    if not ours:
        logger.info("%s: no requests in the last %g s", model, window_s)
        return []
    release, spec = find_version(model, "live")
    seen = summarise(ours, window_s, until=now)
    p99_ms, max_error_share = spec.serving.p99_ms, spec.rollout.max_error_share
    found = breaches(seen, p99_ms=p99_ms, max_error_share=max_error_share)
    for breach in found:
        logger.warning("%s", breach)
        _tell(breach)
    if not found:
        logger.info("%s keeps its promise: %d requests", release.name, len(ours))
    title = f"{model}: the last {window_s / 60:g} minutes"
    svg = await asyncio.to_thread(latency_chart, ours, p99_ms=p99_ms, title=title)
    key = f"{model}-latency"
    await acreate_markdown_artifact(key=key, markdown=_page(title, svg, seen, found), description=title)
    await _drop_old_pages(key)
    return [str(breach) for breach in found]


@task(task_run_name="look_at_tables {model}", cache_policy=NO_CACHE)
async def look_at_tables(model: str) -> None:
    """Emits an event when the live version's tables differ from those it was trained on: once for each change, and
    again after the cool-down if no retraining has read them."""
    release, spec = find_version(model, "live")
    if "data" not in spec.monitoring.retrain or not spec.has_data:
        return
    from serin.etl.build import current_key  # imports pandas: only when needed

    store = Store.open()
    key = await asyncio.to_thread(current_key, spec.data, spec.features, store)
    note, now = environment.home() / "watch" / f"{model}.json", time.time()
    told = json.loads(note.read_text()) if note.exists() else {}
    again_s = max(spec.monitoring.retrain_budget.cool_down, _TELL_AGAIN_S)
    waits = told.get("told") == key and 0 <= now - told.get("t", 0.0) < again_s
    if key is None or waits or store.find_dataset(key) is not None:
        return
    get_run_logger().info("the tables of %s have changed since it was trained", release.name)
    resource = {
        "prefect.resource.id": f"serin.model.{model}",
        "prefect.resource.name": model,
        "serin.model": model,
    }
    text = f"its tables have changed since {release.name} was trained"
    reason = Reason(kind="data", text=text, noticed=now, release=release.name, facts={"dataset": key})
    emit_event(DATA_CHANGED, resource=resource, payload=reason.to_json())
    note.parent.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps({"format": "serin.watch", "version": 1, "told": key, "t": now}))


def _tell(breach: Breach) -> None:
    emit_event(
        BROKEN_PROMISE,
        resource={
            "prefect.resource.id": f"serin.release.{breach.release}",
            "prefect.resource.name": breach.release,
            "serin.model": breach.model,
        },
        payload={**asdict(breach), "text": str(breach)},
    )


def _page(title: str, svg: str, seen: tuple[ReleaseLatency, ...], found: tuple[Breach, ...]) -> str:
    rows = [
        (
            entry.release,
            entry.arm,
            entry.requests,
            entry.requests_per_s,
            *("-" if value is None else value for value in (entry.p50_ms, entry.p95_ms, entry.p99_ms)),
            f"{entry.error_share:.2%}",
        )
        for entry in seen
    ]
    columns = ("release", "arm", "requests", "requests/s", "p50 ms", "p95 ms", "p99 ms", "failed")
    broken = "".join(f"- **broken:** {breach}\n" for breach in found) or "Every promise is kept.\n"
    return f"# {title}\n\n{broken}\n{drawing(svg, title)}\n{table(columns, rows)}"


async def _drop_old_pages(key: str) -> None:
    """Deletes old pages: Prefect keeps every page forever."""
    async with get_client() as client:
        old = await client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
            sort=ArtifactSort.CREATED_DESC,
            offset=_PAGES_KEPT,
        )
        for artifact in old:
            await client.delete_artifact(artifact.id)
