"""Find a run on a Prefect server, read its log and cancel it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.errors import NotFound, NotUp, PrefectGone, RunNotCancellable
from serin.stack.host.run_processes import run_processes
from serin.stack.prefect.follow import FINAL, RunLog, may_be_queued_again
from serin.stack.prefect.login import needed_server
from serin.stack.prefect.rest_api import Api, call, flow_runs, run_log

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOOK_S = 0.5
_CANCEL_S = 90.0  # a cancelled run may clean up for 30 s, its stage on another worker for as long again
_SETTLE_S = 20.0  # the process of a cancelled run reports a crash; its worker then says that it was cancelled


def find_run(api: Api, run: str) -> dict[str, Any]:
    """The newest run with that name, or the one with that id. NotFound when there is none."""
    by = {"id": {"any_": [run]}} if _ID.fullmatch(run) else {"name": {"any_": [run]}}
    body = {"flow_runs": by, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    found: list[dict[str, Any]] = call(api, "POST", "/flow_runs/filter", body)
    if not found:
        raise NotFound(kind="run", name=run, known=[each["name"] for each in flow_runs(api, limit=20)])
    return found[0]


def cancel_run(home: Path, run: str) -> str:
    """Cancel a run and wait until it and its processes have ended; returns its name.

    RunNotCancellable when it had ended before, or does not end in time.
    """
    server = needed_server(home)
    found = find_run(server.api, run)
    if found["state_type"] in FINAL:
        raise RunNotCancellable(run=found["name"], state=str(found["state_name"]).lower())
    call(
        server.api,
        "POST",
        f"/flow_runs/{found['id']}/set_state",
        {
            "state": {
                "type": "CANCELLING",
                "name": "Cancelling",
                "message": "cancelled by `serin runs cancel`",
            }
        },
    )
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
