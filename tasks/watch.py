"""Compares the tables of a live version with those it was trained on, and emits an event when they have changed."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from serin.formats.reason import Reason
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.pipeline.open_spec import opened_spec
from serin.store.store import Store
from tasks.versions import find_version, sent_version

DATA_CHANGED = "serin.data.changed"
_TELL_AGAIN_S = 3600.0


@task(task_run_name="look_at_tables {model}", cache_policy=NO_CACHE)
async def look_at_tables(model: str) -> None:
    """Emits an event when the live version's tables differ from those it was trained on: once for each change, and
    again after the cool-down if no retraining has read them."""
    release, spec = find_version(model, "live")
    if "data" not in spec.monitoring.retrain or not spec.has_data:
        return
    store, sent = Store.open(), sent_version(release)
    if spec.environment is None:
        key = await asyncio.to_thread(_current_key, sent)
    else:  # a process is in one environment at most, and this one looks at all models
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            key = await asyncio.get_running_loop().run_in_executor(other, _current_key, sent)
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


def _current_key(sent: str | dict[str, Any]) -> str | None:
    from serin.etl.identity import current_key  # imports pandas: only when needed

    with opened_spec(sent) as spec:
        return current_key(spec.data, spec.features, Store.open())
