"""Decides how a rollout continues. Pure: observations go in, the next state comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.state import (
    CONTROLLER,
    Hold,
    Phase,
    Rollout,
    Verdict,
    abort,
    begin_again,
    move,
    needs_approval,
    shift,
)
from serin.rollout.decide.verdict import Judgement
from serin.store.artifacts import Release

ReleaseState = Literal["absent", "starting", "ready", "dead"]
_SETTLE_S: Final = 1.0  # Envoy's workers apply new weights a moment after its main thread acknowledges them


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a controller observed before a decision."""

    candidate: ReleaseState = "ready"
    restartable: bool = True  # its process can be restarted
    unready_s: float = 0.0  # for how long the candidate, once ready, has not been ready
    stable_ready: bool = True
    baseline: ReleaseState = "ready"  # also when there is no baseline
    routed: bool = True  # the gateway has applied the journal's weights
    active_requests: int | None = 0  # at the release that is to be stopped; None: unknown
    verified: bool = False
    lacks: str = ""  # what the candidate still lacks for its next step
    problem: str = ""  # why the candidate could not be started, or its golden rows were not answered
    judgement: Judgement | None = None


def advance(now: Rollout, seen: Seen, t: float) -> Rollout:
    """Makes one decision at time `t`. A final phase absorbs everything."""
    match now.phase:
        case Phase.PENDING:
            reason = f"{now.candidate.name} has {now.plan.load_s:.0f} s to become ready"
            return now if now.hold else move(now, t, Phase.LOADING, reason)
        case Phase.LOADING:
            return _load(now, seen, t)
        case Phase.VERIFYING:
            return _verify(now, seen, t)
        case Phase.SHADOWING | Phase.SHIFTING:
            return _gone(now, seen, t) or _shift(now, seen, t)
        case Phase.WITHDRAWING:
            return _leave(now, seen, t, Phase.RESTARTING, now.candidate)
        case Phase.RESTARTING:
            return _restart(now, seen, t)
        case Phase.BAKING:
            return _gone(now, seen, t) or _bake(now, seen, t)
        case Phase.DRAINING:
            return _gone(now, seen, t) or _leave(now, seen, t, Phase.PROMOTED, now.stable)
        case Phase.ABORTING:
            return _leave(now, seen, t, Phase.ROLLED_BACK, now.candidate)
        case Phase.RETIRING:
            return _leave(now, seen, t, Phase.RETIRED, now.candidate)
        case Phase.PROMOTED | Phase.ROLLED_BACK | Phase.RETIRED:
            return now
        case _ as never:
            assert_never(never)


def _load(now: Rollout, seen: Seen, t: float) -> Rollout:
    if seen.problem:
        return abort(now, t, seen.problem, verdict=Verdict.FAIL)
    if seen.candidate == "dead":
        return abort(now, t, f"{now.candidate.name} exited while it was loading", verdict=Verdict.FAIL)
    if seen.candidate == seen.baseline == "ready":
        return move(now, t, Phase.VERIFYING, "ready")
    if t - now.since > now.plan.load_s:
        late = now.baseline if now.baseline and seen.candidate == "ready" else now.candidate
        reason = f"{late.name} was not ready within {now.plan.load_s:.0f} s"
        return abort(now, t, reason, verdict=Verdict.FAIL if late == now.candidate else Verdict.INCIDENT)
    return now


def _verify(now: Rollout, seen: Seen, t: float) -> Rollout:
    if seen.problem:
        return abort(now, t, seen.problem, verdict=Verdict.FAIL)
    if gone := _gone(now, seen, t):
        return gone
    if not seen.verified and t - now.since > now.plan.load_s:
        reason = f"{now.candidate.name} did not answer its golden rows within {now.plan.load_s:.0f} s"
        return abort(now, t, reason, verdict=Verdict.FAIL)
    if not seen.verified or now.hold:
        return now
    if seen.lacks:
        return replace(now, reason=seen.lacks)
    if now.stable is None:
        reason = "the model's first release answers its golden rows"
        if needs_approval(now, 0):
            return _ask(now, 0, reason)
        return move(now, t, Phase.DRAINING, reason, verdict=Verdict.PASS)
    reason = "its golden rows are answered"
    if now.plan.shadow and now.step is None:
        return replace(move(now, t, Phase.SHADOWING, reason, verdict=Verdict.PASS), evidence={})
    if needs_approval(now, 0) and now.step is None:
        return _ask(now, 0, reason)
    return shift(now, t, min(now.step or 0, len(now.plan.steps) - 1), reason)  # the step before a restart


def _restart(now: Rollout, seen: Seen, t: float) -> Rollout:
    if seen.candidate == "absent":
        return move(now, t, Phase.LOADING, now.reason, verdict=now.verdict)
    if t - now.since > now.plan.load_s:
        reason = f"{now.candidate.name} could not be stopped within {now.plan.load_s:.0f} s; {now.reason}"
        return abort(now, t, reason, verdict=Verdict.FAIL)
    return now


def _gone(now: Rollout, seen: Seen, t: float) -> Rollout | None:
    """Rolls back at once, in every mode, when the candidate is dead: statistics only apply to a live one."""
    if seen.candidate in ("dead", "absent"):
        reason = f"{now.candidate.name} is not running"
    elif seen.candidate == "starting" and seen.unready_s > now.plan.unready_s:
        reason = f"{now.candidate.name} has not been ready for {seen.unready_s:.1f} s"
    else:
        return None
    return abort(now, t, reason, verdict=Verdict.FAIL)


def _shift(now: Rollout, seen: Seen, t: float) -> Rollout:
    found = _trouble(now, seen) or seen.judgement
    if found is None:
        return now
    begun = now.hold is not None and now.hold.ends_by_itself and _had_traffic(now)
    now = replace(now, evidence=found.evidence)
    told = _tell(now, found)
    if now.plan.mode == "observe" and not (now.phase is Phase.SHADOWING and found.verdict is Verdict.PASS):
        return told
    match found.verdict:
        case Verdict.FAIL:
            if now.hold is Hold.INCIDENT and not _control_gone(now, seen):
                # The counts include an incident that was not the candidate's alone.
                return begin_again(now, t, "the incident is over; the step begins again")
            doubtful = now.phase is Phase.SHIFTING and found.latency_alone and now.plan.second_opinion
            if doubtful and seen.restartable and not now.restarted:  # a second process may be judged
                reason = f"restarting it for a second judgement before a rollback; {found.reason}"
                return move(replace(now, restarted=True), t, Phase.WITHDRAWING, reason, verdict=found.verdict)
            if now.plan.mode == "hold":
                if now.hold is Hold.PAUSED:
                    return told
                unasked = replace(now, hold=None)  # no approval is pending any more
                return _hold(_tell(unasked, found), Hold.FAILED)
            return abort(now, t, found.reason, verdict=found.verdict)
        case Verdict.NO_TRAFFIC | Verdict.INCIDENT | Verdict.INCONCLUSIVE | Verdict.INVALID:
            if begun and now.hold is Hold.INCIDENT and found.verdict is Verdict.NO_TRAFFIC:
                return _go_on(now, seen, told, found, t, begun=begun)
            keep = now.hold is not None and not now.hold.ends_by_itself
            return _hold(told, now.hold if keep and now.hold else Hold(found.verdict.value))
        case Verdict.WAIT | Verdict.PASS:
            return _go_on(now, seen, told, found, t, begun=begun)
        case _ as never:
            assert_never(never)


def _tell(now: Rollout, found: Judgement) -> Rollout:
    """Returns the state with the new verdict only. The reason of a pause and a pending question stay readable."""
    if now.hold in (Hold.PAUSED, Hold.APPROVAL):
        return replace(now, verdict=found.verdict)
    observed = "observed only: " if now.plan.mode == "observe" else ""
    return replace(now, verdict=found.verdict, reason=f"{observed}{found.reason}", by=CONTROLLER)


def _hold(told: Rollout, hold: Hold) -> Rollout:
    """Adds to a hold that does not end by itself, and that nobody requested, what a person can do."""
    if hold.ends_by_itself or hold in (Hold.PAUSED, Hold.APPROVAL):
        return replace(told, hold=hold)
    return replace(told, hold=hold, reason=f"{told.reason}; resume, promote or abort it")


def _had_traffic(now: Rollout) -> bool:
    """Returns whether the step had requests: silence then only interrupts it, and its time has begun already."""
    evidence = Evidence.from_json(now.evidence.get("guards", {}))
    return evidence.epoch == now.epoch and evidence.candidate.requests > 0 and evidence.split[1] > 0


def _go_on(now: Rollout, seen: Seen, told: Rollout, found: Judgement, t: float, *, begun: bool) -> Rollout:
    if now.hold is Hold.INCIDENT:
        return begin_again(now, t, "the incident is over; the step begins again")
    if now.hold is Hold.NO_TRAFFIC and begun:
        return replace(told, hold=None, verdict=Verdict.WAIT, reason=f"traffic is back; {found.reason}")
    if now.hold is Hold.NO_TRAFFIC:
        back = "requests are recorded" if now.phase is Phase.SHADOWING else "traffic is back"
        return replace(
            told, hold=None, since=t, verdict=Verdict.WAIT, reason=f"{back}; the step's time begins"
        )
    if now.hold is not None or found.verdict is Verdict.WAIT:
        return told
    following = 0 if now.step is None else now.step + 1
    if seen.lacks:
        return replace(told, verdict=Verdict.WAIT, reason=f"{seen.lacks}; {found.reason}")
    if needs_approval(now, following):
        return _ask(told, following, found.reason)
    return shift(now, t, following, found.reason)


def _ask(now: Rollout, step: int, reason: str) -> Rollout:
    share = 100.0 if now.stable is None else now.plan.steps[step]
    reason = f"{share:g}% of traffic waits for approval; {reason}"
    return replace(now, hold=Hold.APPROVAL, verdict=Verdict.PASS, reason=reason, by=CONTROLLER)


def _trouble(now: Rollout, seen: Seen) -> Judgement | None:
    """Holds for a problem that is not the candidate's. The judge's observations are kept."""
    evidence = seen.judgement.evidence if seen.judgement else now.evidence
    if not seen.routed:
        reason = "the gateway did not accept the weights"
    elif not seen.stable_ready:
        assert now.stable is not None
        reason = f"the stable release {now.stable.name} is not ready"
    elif _control_gone(now, seen) and not (seen.judgement and seen.judgement.verdict is Verdict.FAIL):
        assert now.baseline is not None
        reason = f"the control {now.baseline.name} is not ready"
    else:
        return None
    return Judgement(verdict=Verdict.INCIDENT, reason=reason, evidence=evidence)


def _control_gone(now: Rollout, seen: Seen) -> bool:
    """Returns whether the baseline is gone. That excuses nothing: no traffic moves between it and the candidate."""
    return bool(now.baseline_percent) and seen.baseline != "ready"


def _bake(now: Rollout, seen: Seen, t: float) -> Rollout:
    found = seen.judgement
    if found is None:
        return now
    now = replace(now, evidence=found.evidence)
    told = _tell(now, found)
    if now.plan.mode == "observe":
        return told
    if found.verdict is Verdict.FAIL:
        if now.plan.mode == "hold":
            return _hold(told, now.hold or Hold.FAILED)
        return abort(now, t, found.reason, verdict=found.verdict)
    if found.verdict is Verdict.NO_TRAFFIC:
        return _hold(told, now.hold or Hold.NO_TRAFFIC)
    if now.hold is Hold.NO_TRAFFIC:
        reason = "traffic is back; the bake begins again"
        return replace(told, hold=None, since=t, verdict=Verdict.WAIT, reason=reason)
    if found.verdict is Verdict.PASS and now.hold is None and seen.routed:
        return move(now, t, Phase.DRAINING, found.reason, verdict=found.verdict)
    return told


def _leave(now: Rollout, seen: Seen, t: float, end: Phase, leaving: Release | None) -> Rollout:
    """Moves to a final phase once the leaving release has no requests in flight, or its time is over.

    When a model's first release arrives, nothing leaves: then it is enough that the gateway sends requests to it.
    """
    waited = t - now.since
    if not seen.routed or waited < _SETTLE_S or now.hold:
        return now
    if leaving is None:
        return move(now, t, end, now.reason, verdict=now.verdict)
    if seen.active_requests == 0:
        reason = f"{leaving.name} has no request in flight"
    elif waited >= now.plan.drain_s:
        under_way = "unknown" if seen.active_requests is None else seen.active_requests
        reason = f"{leaving.name} had {now.plan.drain_s:.0f} s to finish; requests in flight: {under_way}"
    else:
        return now
    told = f"{now.reason}; {reason}" if now.phase is Phase.DRAINING else now.reason
    return move(now, t, end, told, verdict=now.verdict)
