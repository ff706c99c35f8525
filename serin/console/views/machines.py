"""GPUs with their leases and releases, and runs with their stages and receipts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from serin.console.formats import duration
from serin.console.views.view import Parameters
from serin.errors import NotFound, SerinError
from serin.host.gpu_use import read_gpu_use
from serin.host.state import read_stack
from serin.machine.leases import Holder
from serin.prefect.run_entries import (
    RunEntry,
    flow_run_details,
    flow_run_entries,
    training_details,
    training_entries,
)
from serin.reports.charts import Bar, bars
from serin.spec.roles import Access
from serin.store.artifacts import Release
from serin.store.receipt import Receipt

_MOST_RUNS = 60


def read_gpus(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del parameters
    return {
        "gpus": [
            replace(
                gpu,
                releases=tuple(
                    each for each in gpu.releases if access.sees(Release.parse(each.release).model)
                ),
                holders=tuple(_known(each, access) for each in gpu.holders),
            )
            for gpu in read_gpu_use(home)
        ]
    }


def _known(holder: Holder, access: Access) -> Holder:
    """Returns a lease without its purpose where that is of a model that somebody may not view, or of none for sure."""
    _, named, model = holder.purpose.rpartition(" of ")
    shown = access.sees_all or (named and access.sees(model))
    return holder if shown else replace(holder, purpose="")


def read_runs(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del parameters
    found, trouble = _newest_runs(access)
    longest = max((run.seconds or 0.0 for run in found), default=0.0)
    return {"runs": found, "trouble": trouble, "longest": longest or 1.0, **_prefect(home)}


def _newest_runs(access: Access) -> tuple[list[RunEntry], str]:
    """Returns flow runs and trainings of models that somebody may view, and runs that name none, newest first; and
    why flow runs are missing."""
    trouble = ""
    try:
        flows = flow_run_entries(_MOST_RUNS)
    except SerinError as error:
        flows, trouble = [], str(error)
    seen = (entry for entry in (*flows, *training_entries()) if access.sees(entry.model))
    found = sorted(seen, key=lambda entry: -(entry.began or 0.0))
    return found[:_MOST_RUNS], trouble


def read_run(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    name = parameters["run"]
    flow = flow_run_details(name)
    found = flow or training_details(name)
    if found is None or not access.sees(found["model"]):
        raise NotFound(kind="run", name=name, known=[entry.name for entry in _newest_runs(access)[0]])
    if not (found["model"] or access.sees_all):  # it may have worked on any
        found = {**found, "log": [], "message": ""}
    receipts = _receipts(home, found)
    return {
        "run": found,
        "is_flow": flow is not None,
        "receipts": receipts,
        "waits": found.get("waits") or [str(wait) for receipt in receipts for wait in receipt.waits],
        "chart": _chart(receipts),
        **_prefect(home),
    }


def _receipts(home: Path, found: dict[str, Any]) -> list[Receipt]:
    """Returns the receipts of a run's stages, in their order; for a training its own."""
    files = [
        home / stage["receipt"] for stage in found.get("stages", []) if stage.get("receipt") and stage["ran"]
    ]
    if found.get("folder"):
        files.append(Path(found["folder"]) / "receipt.json")
    return [receipt for file in files if (receipt := Receipt.load_file(file))]


def _chart(receipts: list[Receipt]) -> str | None:
    """Draws how long each stage took."""
    if not receipts:
        return None
    rows = [
        Bar(
            label=receipt.stage,
            value=receipt.seconds,
            text=duration(receipt.seconds),
            note=receipt.bound or "",
        )
        for receipt in receipts
    ]
    words = ", ".join(f"{row.label} {row.text}" for row in rows)
    return bars(rows, width=640, label=90).embedded(f"Time of each stage: {words}")


def _prefect(home: Path) -> dict[str, Any]:
    stack = read_stack(home)
    return {"prefect": stack.prefect_ui_url if stack and stack.is_alive and stack.prefect_api_url else None}
