"""Decides whether a model is trained again now, and records it: cool-down, budget, and one run for several triggers.

The record is <home>/watch/retrain/<model>.json. It is written before a run begins, so that a crash never leads to more
runs than the budget allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from serin.formats.reason import Reason, utc
from serin.machine.documents import read_json
from serin.machine.durable import write_whole
from serin.machine.locks import locked
from serin.machine.typed_json import Document
from serin.monitoring.alerts.alert import Alert
from serin.spec.monitoring import MonitoringSpec

Outcome = Literal["promoted", "unchanged", "failed"]

_WEEK_S: Final = 7 * 86400.0
_ROLLOUT_S: Final = 600.0  # after which it may have ended
_ASK_AGAIN_S: Final = 3600.0  # at least
_KEPT: Final = 100  # retrainings, and as many refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """One that was begun. `run`: the orchestrator's; `outcome`: None while it runs, and after a crash; `detail`: the
    new release, or why it failed."""

    t: float
    run: str
    reason: Reason
    ended: float | None = None
    outcome: Outcome | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One that was not begun. `until`: when the next one is allowed; None: nothing has to be waited for."""

    t: float
    reason: Reason
    why: str
    until: float | None = None

    def __str__(self) -> str:
        later = "" if self.until is None else f"; the next one is allowed at {utc(self.until)}"
        return f"not trained again ({self.reason}): {self.why}{later}"


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Document, form="serin.retrain"):
    """What was begun and what was refused, oldest first. `asked_again`: when the watcher last asked again, because an
    alarm was still open."""

    begun: tuple[Retraining, ...] = ()
    refused: tuple[Refusal, ...] = ()
    asked_again: float = 0.0


def decide(
    history: History,
    reason: Reason,
    spec: MonitoringSpec,
    *,
    live: str,
    run: str,
    now: float,
    candidate: str | None = None,
) -> Retraining | Refusal:
    """Whether to train again now. Pure. `live`: the live release; `candidate`: one that is being rolled out.

    A person's request is never refused. A nightly run is bounded by its schedule: it does not wait for the cool-down
    and does not count in the week's budget. A run that changed nothing does not count in the budget either.
    """
    mine = next((each for each in history.begun if each.run == run), None)
    if mine is not None:
        return mine  # a run that was interrupted continues
    begin = Retraining(t=now, run=run, reason=reason)
    if reason.kind == "asked":
        return begin
    if reason.release not in (None, live):
        return Refusal(t=now, reason=reason, why=f"{reason.release} is not live any more, {live} is")
    if candidate is not None:
        why = f"{candidate} is being rolled out; a second rollout would be refused"
        return Refusal(t=now, reason=reason, why=why, until=now + _ROLLOUT_S)
    last = max((each.t for each in history.begun), default=None)
    if last is not None and reason.noticed <= last <= now:
        return Refusal(
            t=now, reason=reason, why=f"the retraining of {utc(last)} began after this was noticed"
        )
    if reason.kind == "nightly":
        return begin
    until, why = _allowed(history.begun, spec, now)
    return begin if until <= now else Refusal(t=now, reason=reason, why=why, until=until)


def _allowed(begun: Iterable[Retraining], spec: MonitoringSpec, now: float) -> tuple[float, str]:
    """When the next one may begin, and why not before. Entries of the future (a clock was set back) do not count."""
    past = [each for each in begun if each.t <= now]
    budget = spec.retrain_budget
    cool = max((each.t + budget.cool_down for each in past), default=now)
    counted = sorted(
        each.t for each in past
        if each.t > now - _WEEK_S and each.reason.kind != "nightly" and each.outcome != "unchanged"
    )  # fmt: skip
    week = counted[-budget.per_week] + _WEEK_S if len(counted) >= budget.per_week else now
    if week >= cool:
        return week, f"{len(counted)} retrainings within seven days (monitoring.retrain_budget.per_week)"
    return cool, "the last one began less than monitoring.retrain_budget.cool_down ago"


def ask_again_at(history: History, spec: MonitoringSpec) -> float | None:
    """When a reason that still holds may be sent again: after the last refusal or the cool-down of the last retraining,
    which has failed, changed nothing, or did not help. None: nothing was asked for yet, or it was sent since. Pure."""
    pause_s = max(spec.retrain_budget.cool_down, _ASK_AGAIN_S)
    times = [each.t + pause_s for each in history.begun[-1:]]
    times += [each.until for each in history.refused[-1:] if each.until is not None]
    at = max(times, default=None)
    return None if at is None or history.asked_again >= at else at


def latest_outcome(history: History) -> str:
    """The outcome of the last request for a retraining, as a line; empty when there was none. Pure."""
    newest: list[Retraining | Refusal] = [*history.begun[-1:], *history.refused[-1:]]
    if not newest:
        return ""
    last = max(newest, key=lambda each: each.t)
    if isinstance(last, Refusal):
        return f"{utc(last.t)}: {last}"
    found = {
        None: "has begun",
        "unchanged": f"changed nothing: the tables are those that {last.detail} was trained on",
        "promoted": f"made {last.detail}",
        "failed": f"failed: {last.detail}",
    }[last.outcome]
    return f"the retraining of {utc(last.t)} ({last.reason}) {found}"


def failed_key(model: str) -> str:
    return f"{model}/retrain/failed"


def failed_alert(model: str, release: str, reason: Reason, error: str, *, now: float) -> Alert:
    """The alert about a retraining that failed, which no person started and may be waiting for. Pure."""
    return Alert(
        key=failed_key(model),
        kind="retrain",
        model=model,
        release=release,
        severity="ticket",
        title="its retraining failed",
        text=f"It was begun because of {reason}. {release} stays live. {error[:1000]}",
        since=now,
        facts={"reason": reason.to_json(), "error": error[:1000]},
    )


class RetrainBook:
    """The record of one model."""

    def __init__(self, home: Path, model: str) -> None:
        self.path = home / "watch" / "retrain" / f"{model}.json"

    def read(self) -> History:
        advice = "restore it, or move it away: then nothing is known about earlier retrainings of this model"
        return read_json(self.path, History.from_json, advice=advice) or History()

    def request(
        self,
        reason: Reason,
        spec: MonitoringSpec,
        *,
        live: str,
        run: str,
        now: float,
        candidate: str | None = None,
    ) -> Retraining | Refusal:
        """Decides and records the decision."""
        with self._changing():
            history = self.read()
            decision = decide(history, reason, spec, live=live, run=run, now=now, candidate=candidate)
            if isinstance(decision, Refusal):
                self._write(replace(history, refused=(*history.refused, decision)))
            elif decision not in history.begun:
                self._write(replace(history, begun=(*history.begun, decision)))
        return decision

    def end(self, run: str, outcome: Outcome, detail: str, now: float) -> None:
        """Records how a retraining ended."""
        with self._changing():
            history = self.read()
            begun = tuple(
                replace(each, ended=now, outcome=outcome, detail=detail[:1000]) if each.run == run else each
                for each in history.begun
            )
            self._write(replace(history, begun=begun))

    def note_asked_again(self, now: float) -> None:
        """Records that an open alarm has asked for another retraining."""
        with self._changing():
            self._write(replace(self.read(), asked_again=now))

    def _changing(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return locked(self.path.with_suffix(".lock"))

    def _write(self, history: History) -> None:
        newest = replace(history, begun=history.begun[-_KEPT:], refused=history.refused[-_KEPT:])
        write_whole(self.path, newest.dump())


def read_retraining(home: Path, model: str) -> History:
    """What is recorded about a model's retrainings, for pages and commands."""
    return RetrainBook(home, model).read()
