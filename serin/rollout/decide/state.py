"""The state of one rollout and the transitions between its phases. Pure. advance.py decides which transition to make.

    Pending -> Loading -> Verifying -> Shifting(step) ... -> Baking -> Draining -> Promoted

    with recorded requests before the first step: Verifying -> Shadowing -> Shifting.
    from each of these: -> Aborting -> RolledBack; the first release of a model goes from Verifying to Draining.
    for a second opinion: Shifting -> Withdrawing -> Restarting -> Loading, once in a rollout.
    taken out of service: Retiring -> Retired; `candidate` is the release that was live.

Which releases run, are routed and are called live follows from the state alone, so that a controller can apply it
repeatedly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, assert_never

from serin.rollout.decide.plan import StoredPlan
from serin.store.artifacts import ModelRoute, NamedRelease, Release

CONTROLLER: Final = "controller"
SHADOW: Final = "shadow"  # the part of the evidence that recorded requests gave


class Verdict(StrEnum):
    """What the evidence says (verdict.py)."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WAIT = "wait"
    FAIL = "fail"
    NO_TRAFFIC = "no_traffic"
    INCONCLUSIVE = "inconclusive"  # not enough was seen by the deadline
    INVALID = "invalid"  # the evidence contradicts the weights
    INCIDENT = "incident"  # the problem is not the candidate's alone


class Phase(StrEnum):
    PENDING = "pending"
    LOADING = "loading"
    VERIFYING = "verifying"
    SHADOWING = "shadowing"  # it answers recorded requests, and no client
    SHIFTING = "shifting"
    WITHDRAWING = "withdrawing"  # it gets no more traffic and finishes its requests
    RESTARTING = "restarting"  # its process is being stopped and replaced
    BAKING = "baking"
    DRAINING = "draining"
    PROMOTED = "promoted"
    ABORTING = "aborting"
    ROLLED_BACK = "rolled_back"
    RETIRING = "retiring"  # it has no traffic, and finishes what it has
    RETIRED = "retired"  # no version of the model is served

    @property
    def final(self) -> bool:
        return self in (Phase.PROMOTED, Phase.ROLLED_BACK, Phase.RETIRED)


class Hold(StrEnum):
    """Why a rollout is held. The last two end by themselves when their cause does; a person ends the others."""

    PAUSED = "paused"
    FAILED = "failed"  # mode hold: a person is asked instead of rolling back
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    APPROVAL = "approval"  # the next step waits for a person's approval
    NO_TRAFFIC = "no_traffic"
    INCIDENT = "incident"

    @property
    def ends_by_itself(self) -> bool:
        return self in (Hold.NO_TRAFFIC, Hold.INCIDENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Everything that was decided about one rollout. Times are seconds since the epoch."""

    id: str
    candidate: NamedRelease
    stable: NamedRelease | None  # live until this rollout is done
    previous: NamedRelease | None  # live before `stable`
    plan: StoredPlan
    phase: Phase = Phase.PENDING
    step: int | None = None  # index into plan.steps, from the first shift on
    hold: Hold | None = None
    approved: int | None = None  # the step that a person has approved
    epoch: int = 0  # counts the changes of the model's route, over all its rollouts
    began: float
    since: float  # start of the phase or step, or its restart
    evidence_from: float  # where to look for evidence in the log
    evidence_epoch: int = 0  # requests of an earlier epoch are not evidence; independent of any clock
    restarted: bool = False  # the candidate's process is its second one
    verdict: Verdict | None = None
    reason: str = ""
    by: str = CONTROLLER
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.candidate.model

    @property
    def weight_percent(self) -> float:
        """The candidate's share of traffic."""
        match self.phase:
            case Phase.PENDING | Phase.LOADING | Phase.VERIFYING | Phase.ABORTING | Phase.ROLLED_BACK:
                return 0.0
            case Phase.SHADOWING | Phase.WITHDRAWING | Phase.RESTARTING | Phase.RETIRING | Phase.RETIRED:
                return 0.0
            case Phase.SHIFTING:
                assert self.step is not None
                return self.plan.steps[self.step]
            case Phase.BAKING | Phase.DRAINING | Phase.PROMOTED:
                return 100.0
            case _ as never:
                assert_never(never)

    @property
    def baseline(self) -> Release | None:
        """The second process of the stable release, when the plan has a baseline and a step that needs it."""
        if self.stable is None or not self.plan.baseline or self.plan.steps[0] >= 50:
            return None
        return replace(self.stable, baseline=True)

    @property
    def baseline_percent(self) -> float:
        """The baseline's share: the candidate's; 0 from 50% on, where the stable release itself has an equal share."""
        weight = self.weight_percent if self.phase is Phase.SHIFTING else 0.0
        return weight if self.baseline and weight < 50 else 0.0

    @property
    def route(self) -> ModelRoute | None:
        """The model's route; None while no release of the model may be reached."""
        if (
            self.phase in (Phase.SHIFTING, Phase.WITHDRAWING, Phase.BAKING, Phase.DRAINING, Phase.ABORTING)
            and self.step is not None
        ):
            return ModelRoute(
                model=self.model,
                epoch=self.epoch,
                stable=self.stable,
                candidate=self.candidate,
                candidate_percent=self.weight_percent,
                baseline=self.baseline,
                baseline_percent=self.baseline_percent,
            )
        # The first release is promoted once the gateway has the route.
        routed = self.live or (self.candidate if self.phase is Phase.DRAINING else None)
        return ModelRoute(model=self.model, epoch=self.epoch, stable=routed) if routed else None

    @property
    def live(self) -> Release | None:
        return self.candidate if self.phase is Phase.PROMOTED else self.stable

    @property
    def before_live(self) -> Release | None:
        """The release that `rollback` returns to when no rollout runs."""
        if self.phase in (Phase.RETIRING, Phase.RETIRED):
            return self.candidate
        return self.stable if self.phase is Phase.PROMOTED else self.previous

    @property
    def wanted(self) -> tuple[Release, ...]:
        """The releases that may run now; any other release of this model is to be stopped."""
        if self.phase.final:
            return () if self.live is None else (self.live,)
        if self.phase is Phase.RESTARTING:
            return () if self.stable is None else (self.stable,)
        return tuple(release for release in (self.stable, self.baseline, self.candidate) if release)

    @property
    def aliases(self) -> dict[str, Release | None]:
        leaves = self.phase is Phase.RETIRING
        running = None if self.phase.final or leaves else self.candidate
        return {"previous": self.before_live, "live": self.live, "candidate": running}

    @property
    def milestone(self) -> tuple[object, ...]:
        """A value whose change makes a decision worth a line of the journal."""
        return (self.id, self.phase, self.step, self.hold, self.approved, self.epoch, self.verdict, self.plan)


def move(
    now: Rollout,
    t: float,
    phase: Phase,
    reason: str,
    *,
    step: int | None = None,
    verdict: Verdict | None = None,
    by: str = CONTROLLER,
) -> Rollout:
    """Moves to a phase or step, without a hold. A change of the route starts a new epoch."""
    step = now.step if step is None else step
    then = replace(now, phase=phase, step=step, hold=None, since=t, reason=reason, verdict=verdict, by=by)
    return then if then.route == now.route else replace(then, epoch=now.epoch + 1)


def abort(
    now: Rollout, t: float, reason: str, *, verdict: Verdict | None = None, by: str = CONTROLLER
) -> Rollout:
    return move(now, t, Phase.ABORTING, reason, verdict=verdict, by=by)


def begin_again(
    now: Rollout, t: float, reason: str, *, by: str = CONTROLLER, forget: bool = False
) -> Rollout:
    """Restarts the same step with its clock and counts reset.

    The evidence of the comparing guards is kept unless a person discards it: evidence that is gathered a second time
    has one more chance of being wrong.
    """
    return replace(
        now,
        hold=None,
        since=t,
        evidence_from=t,
        epoch=now.epoch + 1,
        evidence_epoch=now.epoch + 1,
        verdict=None,
        reason=reason,
        by=by,
        evidence={} if forget else now.evidence,
    )


def needs_approval(now: Rollout, step: int) -> bool:
    return now.plan.steps[step] in now.plan.approve and now.approved != step


def shift(now: Rollout, t: float, step: int, reason: str, *, by: str = CONTROLLER) -> Rollout:
    """Moves to a step. The step with all traffic is the bake. The first traffic begins the evidence of requests."""
    phase = Phase.BAKING if now.plan.steps[step] == 100 else Phase.SHIFTING
    verdict = Verdict.PASS if by == CONTROLLER else None
    then = move(now, t, phase, reason, step=step, verdict=verdict, by=by)
    if now.phase not in (Phase.VERIFYING, Phase.SHADOWING):
        return then
    shadow = {name: found for name, found in now.evidence.items() if name == SHADOW}  # for the report
    return replace(then, evidence_from=t, evidence_epoch=then.epoch, evidence=shadow)


def restored(now: Rollout, t: float, reason: str, *, by: str) -> Rollout:
    """Returns the state to resume from.

    A rollout that had decided is completed: nothing of the leaving release is left to wait for. Any other one is held
    before its candidate is loaded, and the live release has all traffic. When a person resumes it, the candidate is
    loaded and verified again, and returns to its step with new evidence.
    """
    match now.phase:
        case Phase.PROMOTED | Phase.ROLLED_BACK | Phase.RETIRED:
            return now
        case Phase.DRAINING:
            return move(now, t, Phase.PROMOTED, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case Phase.ABORTING:
            return move(now, t, Phase.ROLLED_BACK, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case Phase.RETIRING:
            return move(now, t, Phase.RETIRED, f"{now.reason}; {reason}", verdict=now.verdict, by=by)
        case _:
            return replace(move(now, t, Phase.PENDING, reason, by=by), hold=Hold.PAUSED)
