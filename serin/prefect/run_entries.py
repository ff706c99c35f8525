"""The runs that the commands show: flow runs of the Prefect server, and trainings in run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serin.errors import StoreError
from serin.host.state import POOLS
from serin.machine import environment
from serin.machine.documents import read_if_any
from serin.prefect.login import PrefectServer, find_server
from serin.spec.names import is_model_name, split_version
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.pipeline.experiments import Experiment, Study

_LAST_LINES = 20
_TAGS_OF_DEPLOYMENTS = ("serin", "stage", "auto-scheduled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One line of `serin runs list`. `model` and `version`: what the run made, as far as it has come."""

    name: str
    kind: str
    state: str
    model: str | None = None
    version: int | None = None
    began: float | None
    seconds: float | None


def flow_run_entries(limit: int) -> list[RunEntry]:
    """The newest flow runs first; none while no stack is up and PREFECT_API_URL names no server."""
    from serin.prefect.rest_api import flow_names, flow_runs

    server = find_server(environment.home())
    if server is None:
        return []
    names = flow_names(server.api)
    return [
        _flow_run_entry(run, names.get(run["flow_id"], "flow"))
        for run in flow_runs(server.api, limit=limit, pools=_pools(server))
    ]


def _pools(server: PrefectServer) -> tuple[str, ...]:
    """Returns the work pools whose runs are shown; none: all. Others may use a shared server for other things."""
    return () if server.is_own else POOLS


def _flow_run_entry(run: dict[str, Any], flow: str) -> RunEntry:
    from serin.store.stage_keys import notes

    model, version = _made(run, notes(environment.home(), run["id"]))
    return RunEntry(
        name=run["name"],
        kind=flow,
        state=str(run["state_name"]).lower(),
        model=model,
        version=version,
        began=_timestamp(run.get("start_time") or run.get("created")),
        seconds=run.get("estimated_run_time"),
    )


def _made(run: dict[str, Any], stages: Sequence[Mapping[str, Any]]) -> tuple[str | None, int | None]:
    """Returns the model and version that a run made, as far as it has come."""
    made = next((entry["version"] for entry in stages if entry.get("version")), None)
    return (made[0], made[1]) if made else (model_asked_for(run), None)


def model_asked_for(run: dict[str, Any]) -> str | None:
    """Returns the model that a run is for; None: it names none for sure.

    A pipeline's run is tagged with its model, and so are its stages' runs; other flows have it as a parameter. Where
    somebody added other tags, their order says nothing, and it is the tag of a model in the store."""
    parameters = run.get("parameters") or {}
    spec = parameters.get("spec")
    named = spec.get("name") if isinstance(spec, dict) else parameters.get("model") or parameters.get("name")
    if isinstance(named, str) and is_model_name(model := split_version(named)[0]):
        return model
    tags = [str(tag) for tag in run.get("tags") or () if tag not in _TAGS_OF_DEPLOYMENTS]
    models = [tag for tag in tags if is_model_name(tag)]
    if len(models) > 1:
        store = Store.open()
        models = [tag for tag in models if store.versions(tag)]
    return models[0] if len(models) == 1 else None


def flow_run_details(name: str) -> dict[str, Any] | None:
    """Everything about the newest flow run with that name; None when there is none."""
    from serin.prefect.rest_api import flow_names, flow_runs, run_log
    from serin.store.run_waits import run_waits
    from serin.store.stage_keys import notes

    server = find_server(environment.home())
    found = flow_runs(server.api, limit=1, name=name, pools=_pools(server)) if server else []
    if server is None or not found:
        return None
    api, run = server.api, found[0]
    stages = notes(environment.home(), run["id"])
    return {
        "run": run["name"],
        "id": run["id"],
        "flow": flow_names(api).get(run["flow_id"], "?"),
        "model": _made(run, stages)[0],
        "state": run["state_name"],
        "message": (run.get("state") or {}).get("message") or "",
        "began": run.get("start_time") or "",
        "seconds": run.get("estimated_run_time"),
        **_sent(run["parameters"].get("spec")),
        **_environment(stages),
        "parameters": run["parameters"],
        "stages": stages,
        "waits": [str(wait) for wait in run_waits(environment.home(), run["id"])],
        "log": run_log(api, run["id"]),
    }


def _sent(spec: Any) -> dict[str, str]:
    """What a run was started with: the spec, the package with its code, and the environment that it asks for."""
    from serin.pipeline.open_spec import package_spec
    from serin.store.packages import REFERENCE

    if isinstance(spec, dict):
        return {"spec": str(spec.get("name"))}
    if not isinstance(spec, str):
        return {}
    if not spec.startswith(REFERENCE):
        return {"spec": spec}
    try:
        written = package_spec(spec)
    except (StoreError, OSError) as error:
        return {"code": spec, "spec": f"unknown: {error}"}
    own = written.get("environment")
    return {
        "spec": str(written["name"]),
        "code": spec,
        "environment": json.dumps(own) if own else "the worker's",
    }


def _environment(stages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The environment that stages had, in place of what was asked for; empty before one has ended."""
    had = dict.fromkeys(stage["environment"] for stage in stages if "environment" in stage)
    return {"environment": ", ".join(had)} if had else {}


def training_entries() -> list[RunEntry]:
    """Trainings and searches whose folders are in this home, as the page of experiments describes them."""
    from serin.pipeline.experiments import Experiment
    from serin.store.runs import runs

    found = []
    for name in runs(environment.home()):
        made = _described(name)
        receipt = made.receipt if isinstance(made, Experiment) else None
        found.append(
            RunEntry(
                name=name,
                kind="training" if isinstance(made, Experiment) else "search",
                state=made.state,
                model=made.model,
                began=made.began,
                seconds=receipt.seconds if receipt else None,
            )
        )
    return found


def training_details(name: str, *, lines: int = _LAST_LINES) -> dict[str, Any] | None:
    """Everything about one training, with the last lines of its progress; None when there is none."""
    from serin.store.runs import runs

    if name not in runs(environment.home()):
        return None
    folder, made = environment.home() / "runs" / name, _described(name)
    return {
        "run": name,
        "model": made.model,
        "state": made.state,
        "folder": str(folder),
        "metrics": read_if_any(folder / "result" / "metrics.json").get("metrics", {}),
        "receipt": read_if_any(folder / "receipt.json"),
        "log": _last_lines(folder / "progress.jsonl", lines),
    }


def _described(name: str) -> Experiment | Study:
    from serin.pipeline.experiments import describe_search, describe_training

    folder = environment.home() / "runs" / name
    return describe_search(folder) if name.startswith("search-") else describe_training(folder)


def _last_lines(path: Path, lines: int) -> list[str]:
    from serin.training.launch.progress import describe

    if not path.exists():
        return []
    found = [describe(json.loads(line)) for line in path.read_text().splitlines()]
    return [line for line in found if line][-lines:]


def _timestamp(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None
