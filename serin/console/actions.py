"""What an operator may do: commands to the rollout controller, and acknowledging or silencing alerts.

Each has a page that asks for a confirmation. The controller and the alert book write down who did it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from serin.console.login import read_signed_form
from serin.console.state import Console, Session
from serin.console.views.models import known_model
from serin.errors import SerinError
from serin.monitoring.alerts.book import read_alerts
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.commands import Command, Kind
from serin.rollout.run.status import ModelStatus, status_of
from serin.store.artifacts import Release, parse_label
from serin.store.store import Store
from serin.watcher.cluster_state import find_book, watch_home

log = logging.getLogger(__name__)

_LONGEST_REASON = 500
_SILENCES: Final = {"1": 3600.0, "8": 8 * 3600.0, "24": 86_400.0, "168": 7 * 86_400.0}  # hours


@dataclass(frozen=True, slots=True)
class Action:
    """A command to the controller. `running`: it is for a rollout that has not ended; `drastic`: it moves traffic at
    once, and needs a reason."""

    label: str
    explains: str
    running: bool = True
    drastic: bool = False


_PROMOTE = "Give the candidate all traffic now, whatever the evidence says."
_ABORT = "Move all traffic back to the live version now and end the rollout."
_ROLL_BACK = "Return to an earlier version: at once while it is still warm, else by a new rollout."
ACTIONS: Final[dict[Kind, Action]] = {
    "pause": Action("Pause", "Hold the rollout where it is. Traffic stays split as it is now."),
    "resume": Action("Resume", "Let a held rollout continue."),
    "approve": Action("Approve", "Allow the next step, where the plan asks for a person's word."),
    "promote": Action("Promote", _PROMOTE, drastic=True),
    "abort": Action("Abort", _ABORT, drastic=True),
    "rollback": Action("Roll back", _ROLL_BACK, running=False, drastic=True),
}


class Actions:
    def __init__(self, console: Console) -> None:
        self._console = console

    async def ask_rollout(self, request: Request) -> Response:
        """Shows what is about to be done, and asks for a confirmation."""
        session = self._operator(request)
        model, kind = request.path_params["model"], _kind(request)
        state = await run_in_threadpool(self._state, model, kind)
        versions = await run_in_threadpool(_versions, state) if kind == "rollback" else []
        return self._console.page(
            request,
            "confirm",
            session=session,
            section="models",
            title=f"{ACTIONS[kind].label} {model}",
            action=ACTIONS[kind],
            state=state,
            versions=versions,
        )

    async def do_rollout(self, request: Request) -> Response:
        """Gives the command to the controller, whose journal records it with the person's name."""
        session = self._operator(request)
        fields = await read_signed_form(self._console, request, session)
        model, kind = request.path_params["model"], _kind(request)
        state = await run_in_threadpool(self._state, model, kind)
        if fields.get("rollout") != state.rollout.id:
            raise HTTPException(409, "another rollout has started since you opened this page; look again")
        label, why = fields.get("version", ""), _reason(fields)
        if ACTIONS[kind].drastic and not why:
            raise HTTPException(
                400, f"{ACTIONS[kind].label} needs a reason for the journal; go back and give one"
            )
        named = parse_label(label) if kind == "rollback" else None
        if kind == "rollback" and label and named is None:
            raise HTTPException(400, f"{label!r} is not a version; choose one of the list")
        version, edition = named or (None, 1)
        command = Command(kind=kind, model=model, by=session.who, why=why, version=version, edition=edition)
        try:
            answer = await run_in_threadpool(find_rollouts(self._console.home).mailbox.ask, command)
        except SerinError as error:
            raise HTTPException(503, str(error)) from error
        log.info("%s: %s %s: %s", session.who, kind, model, "accepted" if answer.accepted else answer.reason)
        if not answer.accepted:
            raise HTTPException(409, f"the controller refused: {answer.reason}")
        self._console.forget()
        return RedirectResponse(f"/models/{model}/rollout?done={kind}", 303)

    async def ask_alert(self, request: Request) -> Response:
        session = self._operator(request)
        what = _what(request)
        home = await run_in_threadpool(watch_home, self._console.home, "alerts")
        found = await run_in_threadpool(read_alerts, home, resolved=0)
        record = next((each for each in found.open if str(each.id) == request.path_params["alert"]), None)
        if record is None:
            raise HTTPException(404, "this alert is not open any more")
        return self._console.page(
            request,
            "confirm_alert",
            session=session,
            section="alerts",
            title=f"{what.capitalize()} an alert",
            what=what,
            record=record,
        )

    async def do_alert(self, request: Request) -> Response:
        session = self._operator(request)
        fields = await read_signed_form(self._console, request, session)
        what, key = _what(request), fields.get("key", "")
        note = _reason(fields)
        now = time.time()
        try:
            book = await run_in_threadpool(find_book, self._console.home)
            if what == "acknowledge":
                await run_in_threadpool(book.acknowledge, key, by=session.who, note=note, now=now)
            else:
                until = now + _SILENCES.get(fields.get("hours", ""), _SILENCES["1"])
                await run_in_threadpool(
                    book.silence, pattern=key, until=until, by=session.who, why=note, now=now
                )
        except SerinError as error:
            raise HTTPException(409, str(error)) from error
        log.info("%s: %s %s", session.who, what, key)
        self._console.forget()
        return RedirectResponse("/alerts", 303)

    def _operator(self, request: Request) -> Session:
        session = self._console.session(request)
        if session is None:
            raise HTTPException(401, "log in first")
        if not session.may_act:
            log.warning("%s may not %s", session.who, request.url.path)
            raise HTTPException(403, "a viewer may only read; log in as an operator to do this")
        return session

    def _state(self, model: str, kind: Kind) -> ModelStatus:
        known_model(self._console.home, model)
        state = status_of(find_rollouts(self._console.home), model)
        if state is None:
            raise HTTPException(409, f"{model} has had no rollout")
        if ACTIONS[kind].running and not state.rollout.running:
            raise HTTPException(409, f"the rollout of {model} has ended: {state.rollout.phase}")
        return state


def _reason(fields: Mapping[str, str]) -> str:
    why = fields.get("why", "").strip()
    if len(why) > _LONGEST_REASON:
        raise HTTPException(
            400, f"a reason has at most {_LONGEST_REASON} characters, this one has {len(why)}"
        )
    return why


def _kind(request: Request) -> Kind:
    kind: Kind = request.path_params["kind"]
    if kind not in ACTIONS:
        raise HTTPException(404, "there is no such action")
    return kind


def _what(request: Request) -> str:
    what = str(request.path_params["what"])
    if what not in ("acknowledge", "silence"):
        raise HTTPException(404, "there is no such action")
    return what


def _versions(state: ModelStatus) -> list[str]:
    """The versions that can be returned to, newest first, each with the editions of its lookups."""
    store, live = Store.open(), state.live_release
    found = (
        Release(model=state.name, version=version, edition=edition)
        for version in reversed(store.versions(state.name))
        for edition in reversed(store.editions(state.name, version))
    )
    return [release.label for release in found if release != live]
