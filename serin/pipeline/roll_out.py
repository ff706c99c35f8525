"""Rolls out a published version: submits it to the controller, follows its decisions, reports the outcome.

The controller owns the rollout. If the caller dies, the rollout continues, and the next call follows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serin.errors import (
    BundleBroken,
    NotFound,
    RolloutError,
    RolloutFailed,
    RolloutRefused,
    RolloutUnfinished,
    StageStopped,
)
from serin.formats.bundle import read_manifest
from serin.formats.reason import read_reason
from serin.formats.serving.journal import Decision
from serin.machine import environment
from serin.pipeline.follow_files import process_lines, triton_line
from serin.pipeline.stage import StageResult
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from serin.rollout.run.access import Rollouts, find_rollouts
from serin.rollout.run.commands import Command, Kind
from serin.rollout.run.status import status_of
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store

DECISIONS = __name__
"""The logger of the decisions: each line is worth keeping."""
OnDecision = Callable[[Decision], None]

_POLL_S = 0.5
_log = logging.getLogger(DECISIONS)


def roll_out(
    spec: PipelineSpec,
    release: Release,
    *,
    by: str | None = None,
    on_decision: OnDecision = lambda _: None,
    stop: threading.Event | None = None,
) -> StageResult[Release]:
    """The release, live for all clients. RolloutFailed with the reason when it was rolled back."""
    running = begin_rollout(spec, release, by=by)
    if running is None:
        return StageResult(value=release, ran=False, why=f"{release.name} is live already")
    decisions = follow_rollout(release, running, on_decision=on_decision, stop=stop)
    return StageResult(value=rollout_outcome(release, decisions), ran=True, why=decisions[-1].reason)


def begin_rollout(spec: PipelineSpec, release: Release, *, by: str | None = None) -> str | None:
    """The id of the release's rollout that runs now, begun if there was none. None: the release is live already.

    `by`: who asks, for the journal; the user when nobody is named."""
    plan = Plan.from_spec(spec.rollout, spec.serving, spec.objectives)
    return submit_rollout(
        find_rollouts(), release, plan, by=by or environment.actor(), why=lambda: _why_trained(release)
    )


def stored_plan(bundle: Bundle) -> Plan:
    """The plan in a version's spec."""
    spec = Path(bundle.path) / "spec.yaml"
    if not spec.is_file():
        return Plan()
    wanted = load_spec(spec)
    return Plan.from_spec(wanted.rollout, wanted.serving, wanted.objectives)


def submit_rollout(
    rollouts: Rollouts, release: Release, plan: Plan, *, by: str, why: Callable[[], str]
) -> str | None:
    """Does the same with a plan, where `rollouts` are decided about."""
    status = status_of(rollouts, release.model)
    if status is not None and status.live_release == release and not status.rollout.running:
        _log.info("%s is live already", release.name)
        return None
    if status is not None and status.rollout.running and status.rollout.label == release.label:
        _log.info("the rollout of %s is already running; following it", release.name)
        return status.rollout.id
    command = Command(
        kind="start",
        model=release.model,
        version=release.version,
        edition=release.edition,
        by=by,
        why=why(),
        plan=plan,
    )
    answer = rollouts.mailbox.ask(command)
    if not answer.accepted or answer.rollout is None:
        raise _refused(command, answer.reason)
    _log.info("the controller has accepted %s", release.name)
    return answer.rollout


def _refused(command: Command, reason: str) -> RolloutError:
    """The controller's answer as an error. Its reason may be the text of such an error already."""
    error = RolloutRefused(model=command.model, command=command.kind, reason="")
    return RolloutRefused(model=command.model, command=command.kind, reason=reason.removeprefix(str(error)))


def _why_trained(release: Release) -> str:
    """Why the version was trained again, for the journal; empty when somebody asked for it."""
    try:
        bundle = Store.open().bundle(release.model, release.label)
        reason = read_reason(read_manifest(Path(bundle.path)).lineage)
    except (NotFound, BundleBroken):
        return ""  # the controller refuses it and says so
    return "" if reason is None else f"trained again because of {reason}"


def follow_rollout(
    release: Release,
    rollout: str,
    *,
    on_decision: OnDecision = lambda _: None,
    until_asked: bool = False,
    stop: threading.Event | None = None,
) -> list[Decision]:
    """Every decision, once the last one is made, or once the plan could not have lasted so long by itself.

    `until_asked`: return also when the rollout waits for approval. What the release's Triton logs is logged, too."""
    log, began = environment.home() / "releases" / "logs" / f"{release.name}.log", time.monotonic()

    def ends(decisions: list[Decision]) -> bool:
        if Phase(decisions[-1].phase).final or (until_asked and waits_for_approval(decisions)):
            return True
        return _is_late(decisions, began)

    def tell(decision: Decision) -> None:
        _log.info("%s: %s", release.name, describe(decision))
        on_decision(decision)

    with process_lines(lambda: [log] if log.exists() else [], label=triton_line(release.name)):
        return follow_decisions(release.model, rollout, tell, until=ends, stop=stop)


def follow_decisions(
    model: str,
    rollout: str,
    on_decision: OnDecision,
    *,
    until: Callable[[list[Decision]], bool] = lambda decisions: Phase(decisions[-1].phase).final,
    stop: threading.Event | None = None,
) -> list[Decision]:
    """Every decision, once `until` says so; by default once the last one is made. Each is handed on when it is new,
    also when the journal is compacted in the meantime."""
    stop, read, shown = stop or threading.Event(), find_rollouts().reader(model, rollout), 0
    while True:
        decisions = read()
        for decision in decisions:
            if decision.seq > shown:
                shown = decision.seq
                on_decision(decision)
        if decisions and until(decisions):
            return decisions
        if stop.wait(_POLL_S):
            raise StageStopped(stage="rollout")


def _is_late(decisions: list[Decision], began: float) -> bool:
    plan = Plan.from_json(decisions[0].state["plan"])
    steps_s = (len(plan.steps) - 1) * max(plan.deadline_s, plan.step_s)
    steps_s += max(plan.deadline_s, plan.shadow.time_s) if plan.shadow else 0.0
    return time.monotonic() - began > plan.load_s + steps_s + plan.bake_s + plan.drain_s + 60.0


def waits_for_approval(decisions: list[Decision]) -> bool:
    return bool(decisions[-1].state.get("hold") == Hold.APPROVAL)


def answer_rollout(
    release: Release, rollout: str, *, approve: bool, why: str = "", by: str | None = None
) -> None:
    """Tells the controller what a person has decided. Does nothing when the rollout waits for approval no more."""
    rollouts = find_rollouts()
    status = status_of(rollouts, release.model)
    if status is None or status.rollout.id != rollout or status.rollout.hold != Hold.APPROVAL:
        _log.info("the rollout of %s does not wait for approval any more", release.name)
        return
    kind: Kind = "approve" if approve else "abort"
    command = Command(kind=kind, model=release.model, by=by or environment.actor(), why=why, rollout=rollout)
    answer = rollouts.mailbox.ask(command)
    if not answer.accepted:
        raise _refused(command, answer.reason)


def rollout_outcome(release: Release, decisions: list[Decision]) -> Release:
    """The release when it was promoted; RolloutFailed when it was rolled back, RolloutUnfinished when it still runs."""
    last = decisions[-1]
    if last.phase == Phase.PROMOTED:
        return release
    if last.phase == Phase.ROLLED_BACK:
        turned = next((found for found in decisions if found.phase == Phase.ABORTING), last)
        raise RolloutFailed(release=release.name, model=release.model, reason=turned.reason)
    raise RolloutUnfinished(release=release.name, phase=describe(last))


def describe(decision: Decision) -> str:
    """One decision in a line."""
    phase = f"{decision.weight:g}%" if decision.phase == Phase.SHIFTING else decision.phase.replace("_", " ")
    held = f", held ({decision.state['hold']})" if decision.state.get("hold") else ""
    return f"{phase}{held}: {decision.reason}"
