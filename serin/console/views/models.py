"""The overview of all models, and one model with its versions."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.cluster.status import read_cluster_status
from serin.console.views.view import Parameters
from serin.errors import NotFound, SerinError
from serin.formats.bundle import read_manifest
from serin.formats.importance import read_importance
from serin.formats.schema import ELSEWHERE, read_schema
from serin.host.state import read_stack
from serin.host.wiring import key_file
from serin.machine.documents import read_if_any
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.drift.read import read_drift
from serin.monitoring.history.read import read_history
from serin.monitoring.quality.view import read_quality
from serin.monitoring.retrain import Refusal, Retraining, read_retraining
from serin.pipeline.lookups import EditionTable, edition_tables
from serin.reports.charts import Bar, bars
from serin.rollout.run.access import find_cluster, find_rollouts
from serin.rollout.run.status import ModelStatus, problems, status_of, statuses
from serin.spec.roles import Access
from serin.stack.status import read_status
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.cluster_state import watch_home

_MOST_VERSIONS = 40
_EXAMPLES: dict[str, object] = {
    "string": "text",
    "float": 0.5,
    "int": 1,
    "timestamp": 1_767_225_600_000_000,
    "bool": 1,
}
_MOST_COLUMNS = 12
_MOST_RETRAININGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A line of the overview. Rates and latencies are of the last two minutes, over all releases with traffic."""

    name: str
    live: int | None
    made: float | None  # when the live version was published
    metric: tuple[str, float] | None  # the first of the live version, on its test rows
    drift: str  # what the watch says
    quality: str
    versions: int
    state: ModelStatus | None
    alerts: int
    requests_per_s: float
    p99_ms: float | None
    error_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    number: int
    aliases: dict[str, Release]
    metrics: dict[str, float]
    made: float | None
    spec: str
    trouble: str = ""


def read_overview(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del parameters
    rollouts, now = find_rollouts(home), time.time()
    found = read_status(home, window_s=None) if rollouts.log else None
    states = {each.name: each for each in statuses(rollouts)}
    store = Store.open()
    served = (each for each in states if store.versions(each))
    names = sorted(each for each in {*store.models(), *served} if access.sees(each))
    measured = (f"watch/quality/{name}.json" for name in names)
    state = watch_home(home, "alerts", "history", "watch/drift", *measured)
    alerts = [each for each in read_alerts(state, resolved=0).open if access.sees(each.alert.model)]
    rows = []
    for name in names:
        rate, p99_ms, error_share = _recent(state, name, now)
        live = states[name].live if name in states else None
        shown = _version(store, name, live, {}) if live in store.versions(name) else None
        rows.append(
            ModelRow(
                name=name,
                live=live,
                made=shown.made if shown else None,
                metric=next(iter(sorted(shown.metrics.items())), None) if shown else None,
                drift=_drift_state(state, name),
                quality=_quality_state(state, name, live),
                versions=len(store.versions(name)),
                state=states.get(name),
                alerts=sum(1 for record in alerts if record.alert.model == name),
                requests_per_s=rate,
                p99_ms=p99_ms,
                error_share=error_share,
            )
        )
    rolling = [row.state for row in rows if row.state and row.state.rollout.running]
    return {
        "status": found,
        "cluster": None if found else read_cluster_status(home),
        "rows": rows,
        "alerts": len(alerts),
        "rolling": rolling,
        "problems": {
            name: text for name, text in (found.problems if found else {}).items() if access.sees(name)
        },
        "sees_all": access.sees_all,
    }


def _drift_state(home: Path, model: str) -> str:
    found = read_drift(home, model)
    if found is None:
        return "not watched"
    return f"{len(found.alarms)} of {len(found.columns)} columns drifted" if found.alarms else "no alarm"


def _quality_state(home: Path, model: str, live: int | None) -> str:
    found = read_quality(home, model)
    release = next((each for each in (found.releases if found else ()) if each.version == live), None)
    if release is None:
        return "not measured"
    if release.objective is not None and release.objective.alarm:
        return "worse than its objective"
    name, measured = next(iter(release.metrics.items()), ("", None))
    return f"{name} {measured.value:.4g}" if measured else "no labels yet"


def _recent(home: Path, model: str, now: float) -> tuple[float, float | None, float | None]:
    """Returns requests per second, the largest p99 of a release and the share of failed requests of the last full
    minute and the current one. The history is read, not the request log: that has millions of lines."""
    since = now // 60 * 60 - 60
    found = read_history(home, model, since, now, arms=False)
    points = [
        point for series in (found.series if found else ()) for point in series.points if point.t >= since
    ]
    requests = sum(point.requests for point in points)
    if not requests:
        return 0.0, None, None
    slowest = max((point.p99_ms for point in points if point.p99_ms is not None), default=None)
    return requests / (now - since), slowest, sum(point.errors for point in points) / requests


def read_model(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model, store = parameters["model"], Store.open()
    aliases = store.aliased(model)
    numbers = store.versions(model)
    rows = [_version(store, model, number, aliases) for number in reversed(numbers[-_MOST_VERSIONS:])]
    shown = aliases["live"].version if "live" in aliases else numbers[-1] if numbers else None
    tab = model_tab(home, model, "versions")
    return {
        **tab,
        "rows": rows,
        "lookups": _lookups(store, tab["state"]),
        "left_out": max(len(numbers) - _MOST_VERSIONS, 0),
        "metrics": sorted({name for row in rows for name in row.metrics}),
        "details": _details(store, model, shown) if shown else None,
        "request": _request(home, store, model, shown) if shown else "",
        **_retrainings(home, model),
    }


def _retrainings(home: Path, model: str) -> dict[str, Any]:
    """Returns the last retrainings that were begun or refused, newest first; or why they cannot be read."""
    try:
        found = read_retraining(watch_home(home, "watch/retrain"), model)
    except SerinError as error:
        return {"retrainings": [], "trouble": str(error)}
    rows: list[Retraining | Refusal] = [*found.begun, *found.refused]
    return {"retrainings": sorted(rows, key=lambda each: -each.t)[:_MOST_RETRAININGS], "trouble": ""}


def model_tab(home: Path, model: str, tab: str) -> dict[str, Any]:
    """Returns what every page of a model shows. Raises NotFound for one that is not known."""
    state = known_model(home, model)
    problem = problems(home, model).get(model, "") if find_cluster(home) is None else ""
    return {"model": model, "tab": tab, "state": state, "problem": problem}


def known_model(home: Path, model: str) -> ModelStatus | None:
    """Returns the status of a model; raises NotFound for a name that neither the store nor a rollout knows."""
    state, store = status_of(find_rollouts(home), model), Store.open()
    if state is None and not store.versions(model):
        raise NotFound(kind="model", name=model, known=[])  # the names of others may not be for this person
    return state


def _lookups(store: Store, state: ModelStatus | None) -> list[EditionTable]:
    """Returns the tables that the editions of the live version look columns up in, newest first."""
    if state is None or state.live_release is None:
        return []
    try:
        return edition_tables(store, state.live_release, time.time())[::-1]
    except (SerinError, OSError):
        return []  # it is deleted just now, or damaged: then the table of versions says so


def _version(store: Store, model: str, number: int, aliases: dict[str, Release]) -> VersionRow:
    own = {alias: release for alias, release in aliases.items() if release.version == number}
    try:
        metrics, made, spec = _facts(store.bundle(model, number).path)
    except SerinError as error:
        return VersionRow(number=number, aliases=own, metrics={}, made=None, spec="", trouble=str(error))
    return VersionRow(number=number, aliases=own, metrics=metrics, made=made, spec=spec)


@functools.lru_cache(maxsize=2000)  # a version never changes
def _facts(folder: str) -> tuple[dict[str, float], float, str]:
    manifest = read_manifest(Path(folder))
    made = (Path(folder) / "manifest.json").stat().st_mtime
    return dict(manifest.metrics), made, manifest.spec_digest[:12]


def _details(store: Store, model: str, version: int) -> dict[str, Any] | None:
    """Returns what clients send, what matters most, and how the version compared with the one before."""
    try:
        folder = Path(store.bundle(model, version).path)
        schema, importance = read_schema(folder), read_importance(folder)
    except (SerinError, OSError):
        return None
    champion = read_if_any(folder / "champion.json")
    drawing = None
    if importance and importance.columns:
        shown = [
            Bar(label=each.column, value=max(each.loss, 0.0), text=f"{each.loss:+.4f}")
            for each in importance.columns[:_MOST_COLUMNS]
        ]
        drawing = bars(shown, width=560, label=170).embedded(
            f"Loss of {importance.metric} when a column is shuffled: "
            + ", ".join(f"{bar.label} {bar.text}" for bar in shown)
        )
    return {
        "version": version,
        "inputs": schema.inputs,
        "outputs": schema.outputs,
        "metric": importance.metric if importance else "",
        "importance": drawing,
        "champion": champion.get("reason", ""),
    }


def _request(home: Path, store: Store, model: str, version: int) -> str:
    """Returns a request to copy into a shell: two rows, the second of which has only missing values."""
    try:
        inputs = read_schema(Path(store.bundle(model, version).path)).inputs
    except (SerinError, OSError):
        return ""
    sent = []
    for column in inputs:
        example = _EXAMPLES.get(column.kind)
        if column.dims != (1,) or example is None:
            return ""  # an image, or other inputs that nobody types
        data = [example] if column.source == ELSEWHERE else [example, None]
        sent.append({"name": column.name, "datatype": column.dtype, "shape": [len(data), 1], "data": data})
    body = ",\n  ".join(json.dumps(each) for each in sent).replace("'", "'\\''")
    stack = read_stack(home)
    url = stack.gateway_url if stack else "http://127.0.0.1:8080"
    key = ' -H "authorization: Bearer $KEY"' if _requires_keys(home) else ""
    return f"curl -s {url}/v2/models/{model}/infer{key} -d '{{\"inputs\": [\n  {body}\n]}}'"


def _requires_keys(home: Path) -> bool:
    try:
        return key_file(home).read().required
    except SerinError:
        return True
