"""Follows a run on a Prefect server until it has ended, and shows its log.

Prefect's own watcher takes seconds to start and seconds to end.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from serin.errors import NotFound, NotUp, PipelineFailed, PrefectGone, PrefectRefused
from serin.host.process_scan import run_processes
from serin.machine.log_times import log_at
from serin.prefect.login import PrefectServer
from serin.prefect.rest_api import Api, call, deployments, query_all

logger = logging.getLogger(__name__)

ENDED_BADLY = ("FAILED", "CRASHED", "CANCELLED")
FINAL = ("COMPLETED", *ENDED_BADLY)
_TRIES = 3
_POLL_S = 0.5
_LAST_POLL_S = 0.1
_QUEUED_AGAIN = timedelta(seconds=12)
_LAST_LINES_S = 3.0  # a run sends its log in batches, the last one when its process ends
_LATE = timedelta(seconds=10)  # lines of the worker and of the run arrive in any order
_WORKER = "prefect.flow_runs.worker"  # the logger of the worker about the run
_WARNING = 30
_PLUMBING = (  # Prefect's lines about how it gets to the flow
    "Running 1 deployment pull step", "Executing deployment step:", "Deployment step ",
    "All deployment steps completed", "Beginning flow run ",
)  # fmt: skip
ASKED_TO_STOP = "the run ended: it was asked to stop"
_ENDS = (
    "the run completed",
    "the run failed",
    "the run ended",
    "Finished in state",
)  # the last is Prefect's own


def last_line(state: str, message: str) -> str:
    """The last line of a run's log, by the name and the message of its final state."""
    ended = {"Completed": "the run completed", "Failed": "the run failed"}.get(
        state, f"the run ended as {state}"
    )
    return f"{ended}: {message}" if message else ended


class RunLog:
    """The log of one run, line by line as it comes."""

    def __init__(self, api: Api, run: str) -> None:
        self._api, self._run = api, run
        self._since: datetime | None = None
        self._seen: set[str] = set()
        self.has_ended = False  # the last line that Prefect writes for a run has been read

    def skip(self) -> None:
        """Skips the lines that exist already."""
        self.new_lines()
        self.has_ended = False

    def new_lines(self) -> list[tuple[float, str]]:
        """What the run says about its work, with the time of each line, in that order. The line about its end is left
        out: the follower's caller says that."""
        entries = [entry for entry in self._read() if entry["id"] not in self._seen]
        for entry in entries:
            self._seen.add(entry["id"])
            said = datetime.fromisoformat(entry["timestamp"])
            self._since = max(self._since or said, said)
        self.has_ended = self.has_ended or any(map(_is_last, entries))
        return [
            (datetime.fromisoformat(entry["timestamp"]).timestamp(), entry["message"])
            for entry in entries
            if not _is_last(entry) and not _is_plumbing(entry)
        ]

    def _read(self) -> list[dict[str, Any]]:
        wanted: dict[str, Any] = {"flow_run_id": {"any_": [self._run]}}
        if self._since is not None:
            wanted["timestamp"] = {"after_": (self._since - _LATE).isoformat()}
        return query_all(self._api, "logs", logs=wanted, sort="TIMESTAMP_ASC")


def _is_last(entry: Mapping[str, Any]) -> bool:
    return entry.get("task_run_id") is None and str(entry["message"]).startswith(_ENDS)


def _is_plumbing(entry: Mapping[str, Any]) -> bool:
    if entry["level"] >= _WARNING or entry.get("task_run_id") is not None:
        return False
    return entry["name"] == _WORKER or str(entry["message"]).startswith(_PLUMBING)


def begin_run(
    api: Api,
    deployment: str,
    parameters: dict[str, Any],
    *,
    tags: list[str],
    job_variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Starts a new run of `flow/name` and returns the server's record. Raises PrefectRefused for invalid parameters.
    `job_variables`: what it asks of its work pool.

    A busy server is asked again: it recognises a repeated request by its idempotency key.
    """
    body = {"parameters": parameters, "tags": tags, "idempotency_key": str(uuid.uuid4())}
    if job_variables:
        body["job_variables"] = dict(job_variables)
    for tries_left in reversed(range(_TRIES)):
        try:
            found = _deployment(api, deployment)
            run: dict[str, Any] = call(api, "POST", f"/deployments/{found['id']}/create_flow_run", body)
            return run
        except PrefectGone:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _deployment(api: Api, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = call(api, "GET", f"/deployments/name/{name}")
    except PrefectRefused as refusal:
        if refusal.fields["code"] != 404:
            raise
        raise NotFound(kind="deployment", name=name, known=deployments(api)) from refusal
    return found


def follow_run(server: PrefectServer, run: str, *, what: str, log: RunLog) -> None:
    """Follows a run until it has completed. Raises PipelineFailed when it ended otherwise, NotUp when its stack is
    gone."""
    while True:
        state, found = "", dict[str, Any]()
        with suppress(PrefectGone):  # it is being restarted
            found = call(server.api, "GET", f"/flow_runs/{run}")
            state = "" if may_be_queued_again(found["state"]) else found["state_type"]
            _pass_on(log)
        if state == "COMPLETED":
            _last_words(log)
            return
        if state in ENDED_BADLY and run not in run_processes(server.home):
            _last_words(log)
            reason = found["state"].get("message") or ""
            url = f"{server.ui_url}/runs/flow-run/{run}"
            raise PipelineFailed(spec=what, url=url, state=state.lower(), reason=reason)
        if not server.is_alive:
            raise NotUp(home=server.home)
        time.sleep(_POLL_S)


def may_be_queued_again(state: Mapping[str, Any]) -> bool:
    """Returns whether a crashed run may still be queued again.

    A run that was asked to stop, or resumed before its worker had reported its death, is recorded as crashed until the
    reconciler's next check.
    """
    lasts = datetime.now(UTC) - datetime.fromisoformat(state["timestamp"])
    return state["type"] == "CRASHED" and lasts < _QUEUED_AGAIN


def _pass_on(log: RunLog) -> None:
    for created, line in log.new_lines():
        log_at(logger, line, created)


def _last_words(log: RunLog) -> None:
    deadline = time.monotonic() + _LAST_LINES_S
    with suppress(PrefectGone):
        while not log.has_ended and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            _pass_on(log)
