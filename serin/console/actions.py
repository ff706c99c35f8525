"""What may be done at the console: commands to the rollout controller, and acknowledging or silencing alerts.

Each has a page that asks for a confirmation; a program posts the same form with its key. Who may is decided by the
table of acts (spec/roles.py). The controller and the alert book write down who did it, the audit log also who tried.
"""

from __future__ import annotations

import glob
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from serin.console.login import read_signed_form
from serin.console.state import Console, Session, act_of, check_sees
from serin.console.views.models import known_model
from serin.errors import SerinError
from serin.formats.policy import read_policy
from serin.machine.audit import one_line, write_act
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.alerts.book import read_alerts
from serin.pipeline.roll_out import stored_plan
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.commands import Answer, Command, Kind
from serin.rollout.run.status import ModelStatus, status_of
from serin.spec.names import is_model_name
from serin.spec.roles import ACTS
from serin.store.artifacts import Release, parse_label
from serin.store.store import Store
from serin.watcher.cluster_state import find_book, watch_home

log = logging.getLogger(__name__)

_LONGEST_REASON = 500
_SILENCES: Final = {"1": 3600.0, "8": 8 * 3600.0, "24": 86_400.0, "168": 7 * 86_400.0}  # hours


@dataclass(frozen=True, slots=True)
class Action:
    """A command to the controller. `running`: it is for a rollout that has not ended; `drastic`: it moves traffic at
    once, and needs a reason; `choice`: what the page calls the choice of a version, where there is one."""

    label: str
    explains: str
    running: bool = True
    drastic: bool = False
    choice: str = ""


_START = "Roll a version out by the plan in its spec."
_PROMOTE = "Give the candidate all traffic now, whatever the evidence says."
_ABORT = "Move all traffic back to the live version now and end the rollout."
_ROLL_BACK = "Return to an earlier version: at once while it is still warm, else by a new rollout."
_RETIRE = "Take the model out of service: requests get 404. Its versions stay in the store."
ACTIONS: Final[dict[Kind, Action]] = {
    "start": Action("Roll out", _START, running=False, choice="Version"),
    "pause": Action("Pause", "Hold the rollout where it is. Traffic stays split as it is now."),
    "resume": Action("Resume", "Let a held rollout continue."),
    "approve": Action("Approve", "Allow the next step, where the plan asks for a person's word."),
    "promote": Action("Promote", _PROMOTE, drastic=True),
    "abort": Action("Abort", _ABORT, drastic=True),
    "rollback": Action("Roll back", _ROLL_BACK, running=False, drastic=True, choice="Return to"),
    "retire": Action("Retire", _RETIRE, running=False, drastic=True),
}
_APPROVES: Final = ("approve", "promote")  # they give traffic, to the rollout that was seen and to no other
ON_ALERTS: Final = {"acknowledge": "alerts ack", "silence": "alerts silence"}


class Actions:
    def __init__(self, console: Console) -> None:
        self._console = console

    async def ask_rollout(self, request: Request) -> Response:
        """Shows what is about to be done, and asks for a confirmation."""
        session = await self._console.required_session(request)
        model, kind = _model(request), _kind(request)
        _check_may(session, act_of(kind), model)
        state = await run_in_threadpool(self._state, model, kind)
        versions = await run_in_threadpool(_versions, model, state) if ACTIONS[kind].choice else []
        return self._console.page(
            request,
            "confirm",
            session=session,
            section="models",
            title=f"{ACTIONS[kind].label} {model}",
            model=model,
            kind=kind,
            action=ACTIONS[kind],
            state=state,
            versions=versions,
        )

    async def do_rollout(self, request: Request) -> Response:
        """Gives the command to the controller, whose journal records it with the person's name."""
        session = await self._console.required_session(request)
        model, kind = _model(request), _kind(request)
        async with self._audited(session, act_of(kind), model) as line:
            _check_may(session, act_of(kind), model)
            fields = await read_signed_form(self._console, request, session)
            line["why"], label = _reason(fields), fields.get("version", "")
            line["about"] = f"{model}:{label}" if label else model
            answer = await run_in_threadpool(self._give, session, model, kind, line["why"], fields)
        self._console.forget()
        if session.is_key:
            return JSONResponse({"reason": answer.reason, "rollout": answer.rollout})
        return RedirectResponse(f"/models/{model}/rollout?done={kind}", 303)

    def _give(self, session: Session, model: str, kind: Kind, why: str, fields: Mapping[str, str]) -> Answer:
        """Raises HTTPException for what cannot be asked for, and for what the controller refuses."""
        state, label = self._state(model, kind), fields.get("version", "")
        shown = fields.get("rollout", "" if session.is_key else "none")
        if shown and shown != (state.rollout.id if state else ""):
            raise HTTPException(409, "another rollout has started since you opened this page; look again")
        if kind in _APPROVES and not (shown or label):
            raise HTTPException(400, f"{kind} needs the version that you have seen, such as version=7")
        if ACTIONS[kind].drastic and not why:
            raise HTTPException(
                400, f"{ACTIONS[kind].label} needs a reason for the journal; go back and give one"
            )
        release = _release(model, kind, label)
        if state is not None:
            self._check_another_approves(session, state, kind, release)
        command = Command(
            kind=kind,
            model=model,
            by=session.who,
            why=why,
            version=release.version if release else None,
            edition=release.edition if release else 1,
            plan=stored_plan(Store.open().bundle(model, release.label))
            if kind == "start" and release
            else None,
            rollout=state.rollout.id if state else None,
        )
        try:
            answer = find_rollouts(self._console.home).mailbox.ask(command)
        except SerinError as error:
            raise HTTPException(503, str(error)) from error
        if not answer.accepted:
            raise HTTPException(409, f"the controller refused: {answer.reason}")
        return answer

    def _check_another_approves(
        self, session: Session, state: ModelStatus, kind: Kind, release: Release | None
    ) -> None:
        """Where the store's policy asks for approvals, nobody gives traffic to what they have started themselves."""
        returns = kind == "rollback" and release not in (None, state.live_release, state.previous_release)
        if not (kind in _APPROVES or returns) or not read_policy(Store.open()).approval:
            return
        if returns:
            raise HTTPException(
                403,
                "the store's policy asks for approvals: roll that version out, and let somebody approve it",
            )
        begun = find_rollouts(self._console.home).decisions(state.name, state.rollout.id)[0].by
        if _name(begun) == _name(session.who):
            raise HTTPException(
                403, f"the store's policy asks for approvals, and {begun} has started this rollout: "
                f"somebody else must {kind} it"
            )  # fmt: skip

    async def ask_alert(self, request: Request) -> Response:
        session, what = await self._console.required_session(request), _what(request)
        record = await run_in_threadpool(self._open_alert, session, request.path_params["alert"])
        _check_may(session, ON_ALERTS[what], record.alert.model)
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
        session, what = await self._console.required_session(request), _what(request)
        alert = request.path_params["alert"]
        async with self._audited(session, ON_ALERTS[what], alert) as line:
            record = await run_in_threadpool(self._open_alert, session, alert)
            line["about"] = record.alert.key
            _check_may(session, ON_ALERTS[what], record.alert.model)
            fields = await read_signed_form(self._console, request, session)
            line["why"] = _reason(fields)
            try:
                await run_in_threadpool(
                    self._change_alert, session, what, record.alert.key, line["why"], fields.get("hours", "")
                )
            except SerinError as error:
                raise HTTPException(409, str(error)) from error
        self._console.forget()
        return JSONResponse({"alert": record.id}) if session.is_key else RedirectResponse("/alerts", 303)

    def _open_alert(self, session: Session, alert: str) -> AlertRecord:
        found = read_alerts(watch_home(self._console.home, "alerts"), resolved=0)
        record = next((each for each in found.open if each.id == alert), None)
        if record is None or not session.access.sees(record.alert.model):
            raise HTTPException(404, "this alert is not open any more")
        return record

    def _change_alert(self, session: Session, what: str, key: str, note: str, hours: str) -> None:
        book, now = find_book(self._console.home), time.time()
        if what == "acknowledge":
            book.acknowledge(key, by=session.who, note=note, now=now)
            return
        until = now + _SILENCES.get(hours, _SILENCES["1"])
        book.silence(pattern=glob.escape(key), until=until, by=session.who, why=note, now=now)

    @asynccontextmanager
    async def _audited(self, session: Session, act: str, about: str) -> AsyncIterator[dict[str, str]]:
        """Leaves a line in the audit log, also for what is refused. What is added to `line` is in it."""
        line = {
            "who": session.who,
            "subject": session.subject,
            "act": act,
            "about": about,
            "outcome": "failed",
        }
        try:
            yield line
            line["outcome"] = "done"
        except HTTPException as error:
            line["outcome"] = f"refused: {error.detail}"
            raise
        finally:
            log.info("%s", one_line(f"{session.who}: {act} {line['about']}: {line['outcome']}"))
            await run_in_threadpool(write_act, self._console.home, **line)

    def _state(self, model: str, kind: Kind) -> ModelStatus | None:
        """Returns the status of a model; None: it has had no rollout, and this one begins the first."""
        known_model(self._console.home, model)
        state = status_of(find_rollouts(self._console.home), model)
        if state is None and kind != "start":
            raise HTTPException(409, f"{model} has had no rollout")
        if state is not None and ACTIONS[kind].running and not state.rollout.running:
            raise HTTPException(409, f"the rollout of {model} has ended: {state.rollout.phase}")
        return state


def _check_may(session: Session, act: str, model: str) -> None:
    """Raises HTTPException for an act that is not allowed. Who may not view a model learns nothing about it."""
    check_sees(session.access, model)
    if not session.access.may(act, model):
        about = f"for {model}" if model else "for all models"
        raise HTTPException(
            403, f"this needs the role {ACTS[act]!r} {about}, which {session.who} does not have"
        )


def _release(model: str, kind: Kind, label: str) -> Release | None:
    """Returns the version that was named. Raises HTTPException for what is not one."""
    if kind == "retire" or (kind != "start" and not label):
        return None
    named = parse_label(label)
    if named is None:
        raise HTTPException(400, f"{label!r} is not a version; choose one of the list")
    return Release(model=model, version=named[0], edition=named[1])


def _reason(fields: Mapping[str, str]) -> str:
    why = fields.get("why", "").strip()
    if len(why) > _LONGEST_REASON:
        raise HTTPException(
            400, f"a reason has at most {_LONGEST_REASON} characters, this one has {len(why)}"
        )
    return why


def _name(who: str) -> str:
    """Returns the name of somebody without the groups or the account that gave a role, which may change."""
    return who.partition(" (")[0]


def _model(request: Request) -> str:
    model = str(request.path_params["model"])
    if not is_model_name(model):
        raise HTTPException(404, "this is not the name of a model")
    return model


def _kind(request: Request) -> Kind:
    kind: Kind = request.path_params["kind"]
    if kind not in ACTIONS:
        raise HTTPException(404, "there is no such action")
    return kind


def _what(request: Request) -> str:
    what = str(request.path_params["what"])
    if what not in ON_ALERTS:
        raise HTTPException(404, "there is no such action")
    return what


def _versions(model: str, state: ModelStatus | None) -> list[str]:
    """The versions that may be chosen, newest first, each with the editions of its lookups."""
    store, live = Store.open(), state.live_release if state else None
    found = (
        Release(model=model, version=version, edition=edition)
        for version in reversed(store.versions(model))
        for edition in reversed(store.editions(model, version))
    )
    return [release.label for release in found if release != live]
