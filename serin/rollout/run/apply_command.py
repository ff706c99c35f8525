"""Applies a person's command to a rollout. Pure; raises RolloutRefused, with a way out, if that is impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

from serin.errors import RolloutError, RolloutRefused
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout, abort, begin_again, move, needs_approval, shift
from serin.rollout.run.commands import Command
from serin.store.artifacts import Release


def apply_command(now: Rollout | None, command: Command, t: float) -> Rollout:
    """Returns the state after `command`. `now` is the model's newest rollout, done or not; None: it never had one."""
    if command.rollout is not None and (now is None or now.id != command.rollout):
        another = f", of version {now.candidate.label}" if now else ""
        raise _refused(command, f"another rollout has begun since{another}; look at it and ask again")
    match command.kind:
        case "start":
            if command.release is None:
                raise _refused(command, "name the version to roll out")
            return _begin(now, command, command.release, t)
        case "rollback":
            return _go_back(now, command, t)
        case "retire":
            return _retire(now, command, t)
        case "pause" | "resume" | "approve" | "promote" | "abort":
            if now is None or now.phase.final:
                raise _refused(command, "no rollout is running")
            if command.release not in (None, now.candidate):
                raise _refused(command, f"the rollout that runs is of version {now.candidate.label}")
            return _change(now, command, t)
        case _ as never:
            assert_never(never)


def _begin(now: Rollout | None, command: Command, candidate: Release, t: float) -> Rollout:
    if now and not now.phase.final:
        what = f"the rollout of version {now.candidate.label} is {now.phase}"
        raise _refused(command, f"{what}; wait for its end, or abort it first")
    live = now.live if now else None
    if candidate == live:
        raise _refused(command, f"version {candidate.label} is live already")
    return _new(
        command,
        t,
        candidate=candidate,
        stable=live,
        previous=now.before_live if now else None,
        plan=command.plan or Plan(),
        epoch=now.epoch if now else 0,
        reason=command.why or _asked(command),
    )


def _new(command: Command, t: float, **state: Any) -> Rollout:
    return Rollout(id=command.id, began=t, since=t, evidence_from=t, by=command.by, **state)


def _go_back(now: Rollout | None, command: Command, t: float) -> Rollout:
    """Returns to an earlier version.

    During a rollout, its stable release gets all traffic again at once. Later, the previous version is started,
    verified and given all traffic in one step; the one it replaces stays warm through the bake. A version that is named
    may be any earlier one.
    """
    if now and not now.phase.final:
        if command.release not in (None, now.stable):
            raise _refused(
                command, f"the rollout of version {now.candidate.label} is running; abort it first"
            )
        return _change(now, command, t)
    target = now.before_live if now else None
    if now and command.release:
        target = command.release
    if now is None or target is None:
        raise _refused(command, "no version was live before")
    plan = command.plan or replace(now.plan, mode="enforce")
    return _begin(now, replace(command, plan=plan.at_once()), target, t)


def _retire(now: Rollout | None, command: Command, t: float) -> Rollout:
    """The live release gets no request any more, finishes those it has, and is stopped."""
    if now and not now.phase.final:
        what = f"the rollout of version {now.candidate.label} is {now.phase}; wait for its end"
        raise _refused(command, f"{what}, or run `serin rollout abort {command.model}` first")
    if now is None or now.live is None:
        raise _refused(command, "no version of it is served")
    state = {"candidate": now.live, "stable": None, "previous": now.before_live, "plan": now.plan}
    return _new(command, t, **state, phase=Phase.RETIRING, epoch=now.epoch + 1, reason=_asked(command))


def _change(now: Rollout, command: Command, t: float) -> Rollout:
    if now.phase is Phase.ABORTING:
        raise _refused(command, "it is being rolled back")
    if now.phase is Phase.RETIRING:
        raise _refused(command, "it is being taken out of service; roll it out again after that")
    reason = _asked(command)
    match command.kind:
        case "pause":
            if now.hold is Hold.PAUSED:
                raise _refused(command, "it is paused already")
            return replace(now, hold=Hold.PAUSED, reason=reason, by=command.by)
        case "resume":
            return _resume(now, command, reason, t)
        case "approve":
            return _approve(now, command, reason)
        case "promote":
            return _promote(now, command, reason, t)
        case _:
            return abort(now, t, reason, by=command.by)


def _resume(now: Rollout, command: Command, reason: str, t: float) -> Rollout:
    if now.hold is None:
        raise _refused(command, "it is not held")
    if now.hold is Hold.PAUSED:
        return replace(now, hold=None, reason=reason, by=command.by)
    if now.hold is Hold.APPROVAL:
        raise _refused(command, "it waits for approval; approve it, or abort it")
    forget = now.hold in (Hold.FAILED, Hold.INVALID)
    return begin_again(now, t, reason, by=command.by, forget=forget)


def _approve(now: Rollout, command: Command, reason: str) -> Rollout:
    """Approves the next step, also before approval is requested. The evidence of the step before must still pass."""
    if now.phase in (Phase.BAKING, Phase.DRAINING):
        raise _refused(command, "it has all traffic already")
    step = now.step + 1 if now.phase is Phase.SHIFTING and now.step is not None else 0
    if not needs_approval(now, step):
        raise _refused(command, f"the step of {now.plan.steps[step]:g}% needs no approval")
    hold = None if now.hold is Hold.APPROVAL else now.hold
    return replace(now, approved=step, hold=hold, reason=reason, by=command.by)


def _promote(now: Rollout, command: Command, reason: str, t: float) -> Rollout:
    """Moves on to all traffic, whatever the evidence; from the bake to the end. Never skips the golden rows."""
    match now.phase:
        case Phase.PENDING | Phase.LOADING | Phase.VERIFYING | Phase.WITHDRAWING | Phase.RESTARTING:
            return replace(now, plan=now.plan.at_once(), hold=None, reason=reason, by=command.by)
        case Phase.SHADOWING | Phase.SHIFTING:
            trusted = replace(now, plan=replace(now.plan, min_requests=0))
            return shift(trusted, t, len(now.plan.steps) - 1, reason, by=command.by)
        case Phase.BAKING:
            return move(now, t, Phase.DRAINING, reason, by=command.by)
        case _:
            raise _refused(command, f"it is {now.phase} already")


def _asked(command: Command) -> str:
    """What was asked for, by whom and why."""
    return f"{command.kind} by {command.by}{': ' if command.why else ''}{command.why}"


def _refused(command: Command, reason: str) -> RolloutError:
    return RolloutRefused(model=command.model, command=command.kind, reason=reason)
