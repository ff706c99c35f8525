"""Find a run on a Prefect server, read its log, cancel it, and render it as one page of Markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.errors import NotFound, NotUp, PrefectGone, RunNotCancellable, SpecError
from serin.host.process_scan import run_processes
from serin.prefect.follow import FINAL, RunLog, may_be_queued_again
from serin.prefect.login import needed_server
from serin.prefect.rest_api import Api, call, flow_runs, query, run_log
from serin.prefect.run_entries import model_asked_for
from serin.store.packages import REFERENCE

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOOK_S = 0.5
_CANCEL_S = 90.0  # a cancelled run may clean up for 30 s, its stage on another worker for as long again
_SETTLE_S = 20.0  # the process of a cancelled run reports a crash; its worker then says that it was cancelled
_PICTURE = re.compile(r"!\[[^\]]*\]\(data:image/[^)]*\)\n?")
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_MOST = 60_000  # characters: a comment on GitHub holds 65,536


def find_run(api: Api, run: str) -> dict[str, Any]:
    """The newest run with that name, or the one with that id. NotFound when there is none."""
    by = {"id": {"any_": [run]}} if _ID.fullmatch(run) else {"name": {"any_": [run]}}
    found = query(api, "flow_runs", flow_runs=by, sort="EXPECTED_START_TIME_DESC", limit=1)
    if not found:
        raise NotFound(kind="run", name=run, known=[each["name"] for each in flow_runs(api, limit=20)])
    return found[0]


def package_of(home: Path, run: str) -> str:
    """The reference of the package that a run was sent as. SpecError for a run that was started otherwise."""
    if run.startswith(REFERENCE):
        return run
    found = find_run(needed_server(home).api, run)
    spec = found["parameters"].get("spec")
    if not isinstance(spec, str) or not spec.startswith(REFERENCE):
        what = spec if isinstance(spec, str) else "its spec itself"
        problem = f"was started with {what}, not with a package; only what `serin run` sends can be fetched"
        raise SpecError(where=f"run {found['name']!r}", problems=[("", problem)])
    return spec


def _newest_pipeline(api: Api) -> dict[str, Any]:
    """The newest run of a pipeline that has started. NotFound when there is none."""
    started = {"start_time": {"is_null_": False}}
    flows = {"name": {"any_": ["pipeline"]}}
    found = query(api, "flow_runs", flows=flows, flow_runs=started, sort="START_TIME_DESC", limit=1)
    if not found:
        raise NotFound(kind="run", name="of a pipeline", known=[])
    return found[0]


def cancel_run(home: Path, run: str) -> str:
    """Cancel a run and wait until it and its processes have ended; returns its name.

    RunNotCancellable when it had ended before, or does not end in time.
    """
    server = needed_server(home)
    found = find_run(server.api, run)
    if found["state_type"] in FINAL:
        raise RunNotCancellable(run=found["name"], state=str(found["state_name"]).lower())
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "cancelled by `serin runs cancel`"}
    call(server.api, "POST", f"/flow_runs/{found['id']}/set_state", {"state": state})
    deadline = time.monotonic() + _CANCEL_S
    while time.monotonic() < deadline:
        found = find_run(server.api, found["id"])
        if found["state_type"] in FINAL and found["id"] not in run_processes(home):
            if found["state_type"] != "CRASHED":
                break
            deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if not server.is_alive:
            raise NotUp(home=home)
        time.sleep(_LOOK_S)
    if found["state_type"] != "CANCELLED":
        raise RunNotCancellable(run=found["name"], state=str(found["state_name"]).lower())
    return str(found["name"])


def show_log(home: Path, run: str, show: Callable[[str], None], *, lines: int, follow: bool) -> None:
    """The last lines of a run's log; with `follow` also those that it writes until it has ended."""
    server = needed_server(home)
    api, found = server.api, find_run(server.api, run)
    log = RunLog(api, found["id"])
    if follow:
        log.skip()
    for line in run_log(api, found["id"], lines=lines):
        show(line)
    while follow:
        try:
            state = call(api, "GET", f"/flow_runs/{found['id']}")["state"]
            for created, line in log.new_lines():
                show(f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%S} {line}")
        except PrefectGone:  # it is being restarted
            state = {"type": "", "timestamp": None}
        if state["type"] in FINAL and not may_be_queued_again(state):
            return
        if not server.is_alive:
            raise NotUp(home=home)
        time.sleep(_LOOK_S)


def report(api: Api, run: str | None) -> dict[str, str]:
    """Returns what is known of the run with that name, or of the newest pipeline, as files: `report.md`, without
    pictures, and `card.md`, the model card of its version, once it has one."""
    found = _newest_pipeline(api) if run is None else find_run(api, run)
    pages = _pages(api, [found, *_children(api, found["id"])])
    cards = [pages.pop(key) for key in [*pages] if key.endswith("-card")]
    first = sorted(pages, key=lambda key: not key.endswith("-version"))
    parts = [_head(found), *(_section(pages[key]) for key in first)]
    if found["state_type"] not in ("COMPLETED", "RUNNING", "SCHEDULED", "PENDING"):
        parts.insert(1, f"```\n{(found.get('state') or {}).get('message') or 'no word of why'}\n```\n")
    text = "\n".join(parts)
    files = {"report.md": text if len(text) <= _MOST else f"{text[:_MOST]}\n\n(truncated)\n"}
    return files | {"card.md": cards[-1]} if cards else files


def _children(api: Api, run: str) -> list[dict[str, Any]]:
    """Returns the placed stages of a run."""
    of_run = {"parent_flow_run_id": {"any_": [run]}}
    return query(api, "flow_runs", flow_runs=of_run, sort="START_TIME_ASC", limit=50)


def _pages(api: Api, runs: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the pages of the runs by name, in the order they were made; of pages with the same name the last."""
    of_runs = {"flow_run_id": {"any_": [run["id"] for run in runs]}}
    found = query(api, "artifacts", artifacts=of_runs, limit=100)
    newest = {page["key"]: page for page in sorted(found, key=lambda page: page["created"])}
    ordered = sorted(newest.values(), key=lambda page: page["created"])
    return {page["key"]: str(page["data"]) for page in ordered if page["type"] == "markdown"}


def _head(run: dict[str, Any]) -> str:
    seconds = run.get("total_run_time") or 0.0
    name = model_asked_for(run) or run["parameters"].get("spec") or run["name"]
    return f"## {run['state_name']}: {name}\n\nRun `{run['name']}`, {seconds:,.0f} s.\n"


def _section(page: str) -> str:
    """Renders a page one heading level deeper, below the head of the report."""
    return _HEADING.sub(r"##\1 ", _PICTURE.sub("", page))
