"""Observes releases and gateway, and brings them to the state of the journals.

It decides nothing. All of its actions follow from a rollout's state and may be repeated. An error of a port is reported
and the action retried later: one model's problem does not stop another's rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from serin.rollout.decide.advance import ReleaseState, Seen
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.ports import EvenClock, Fleet, Judge, Router, Versions
from serin.rollout.run.shadow import Shadows
from serin.rollout.run.verification import FOREIGN, TRANSIENT, Beside, Verifications
from serin.store.artifacts import Endpoint, ModelRoute, Release

logger = logging.getLogger(__name__)

_REAPPLY_S: Final = 5.0  # how often unchanged routes are pushed: the gateway may be a new process
_DEAD_S: Final = 10.0  # a live release may be busy, or be restarted by its host: killing makes it worse
_LACKS_S: Final = 60.0  # how long a rollout that should not wait waits for what its candidate lacks
_RETRY_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


Lacks = Callable[[Rollout], str]
"""Says what the candidate of a rollout still lacks for its next step; empty: nothing."""


@dataclass(slots=True)
class Patience:
    """Tells when a failed action may be retried, with growing delays."""

    failures: int = 0
    at: float = 0.0

    def failed(self, t: float) -> None:
        self.at = t + _RETRY_S[min(self.failures, len(_RETRY_S) - 1)]
        self.failures += 1

    def done(self) -> None:
        self.failures, self.at = 0, 0.0


@dataclass(slots=True)
class Memory:
    """What was done and seen for one model. It may be lost: it only saves work."""

    swept: str = ""  # the phase in which no unwanted release was found running
    named: dict[str, Release | None] | None = None  # the aliases as they were last set
    problem: str = ""  # why the candidate could not be started
    # The process that got traffic, by rollout and whether the candidate was restarted.
    instances: dict[tuple[str, bool], int] = field(default_factory=dict)
    ready_at: dict[Release, float] = field(default_factory=dict)  # when each was last seen ready
    restart: Patience = field(default_factory=Patience)
    baseline: Patience = field(default_factory=Patience)
    naming: Patience = field(default_factory=Patience)
    sweeping: Patience = field(default_factory=Patience)


class Reconciler:
    def __init__(
        self,
        *,
        router: Router,
        fleet: Fleet,
        judge: Judge,
        versions: Versions,
        clock: EvenClock,
        shadows: Shadows,
        beside: Beside | None = None,
        lacks: Lacks = lambda _: "",
    ) -> None:
        self._router, self._fleet, self._judge, self._versions = router, fleet, judge, versions
        self._clock, self._shadows = clock, shadows
        self._verifications, self._lacks = Verifications(fleet, beside), lacks
        self._memories: dict[str, Memory] = {}
        self._states: dict[Release, ReleaseState] = {}
        self._applied: object = None
        self._apply_again_at = 0.0
        self._routed = False
        self._told: dict[str, str] = {}

    def look_again(self) -> None:
        """Discards cached states, so that each release is asked again once."""
        self._states.clear()

    # observing

    def running_models(self) -> set[str]:
        """Returns the models with a release that runs, as far as that is known."""
        try:
            return {release.model for release in self._fleet.running()}
        except FOREIGN:
            return set()

    def see(self, now: Rollout, t: float) -> Seen:
        memory = self._memory(now)
        verified, problem = False, memory.problem if now.phase is Phase.LOADING else ""
        if now.phase is Phase.VERIFYING and self._state(now.candidate) == "ready":
            verified, problem = self._verifications.of(now)
        return Seen(
            candidate=self._candidate_state(memory, now),
            restartable=self._restartable(now),
            unready_s=self._unready_s(memory, now.candidate),
            stable_ready=now.stable is None or self._unready_s(memory, now.stable) <= now.plan.unready_s,
            baseline=self._state(now.baseline) if now.baseline else "ready",
            routed=self._routed,
            active_requests=self._active_requests(now),
            verified=verified,
            lacks=self._lacking(now, t),
            problem=problem,
            judgement=self._judgement(now, t),
        )

    def _lacking(self, now: Rollout, t: float) -> str:
        """A rollout that needs no evidence, as a rollback, and a model's first release wait, but not for long."""
        hurries = now.stable is None or not now.plan.min_requests
        if now.phase not in (Phase.VERIFYING, Phase.SHIFTING) or (hurries and t - now.since >= _LACKS_S):
            return ""
        try:
            return self._lacks(now)
        except FOREIGN as error:
            return str(error)

    def _judgement(self, now: Rollout, t: float) -> Judgement | None:
        if now.phase is Phase.SHADOWING:
            return self._shadows.judge(now, t)
        self._shadows.stop(now.model)
        return self._judge.judge(now, t) if now.phase in (Phase.SHIFTING, Phase.BAKING) else None

    def _candidate_state(self, memory: Memory, now: Rollout) -> ReleaseState:
        """Returns "dead" also for a restarted candidate: one that dies under traffic has failed, even if its host
        restarts it. Its process is the one that was seen last before it got traffic."""
        state = self._state(now.candidate)
        judged = now.phase in (Phase.SHADOWING, Phase.SHIFTING, Phase.BAKING)
        if state not in ("ready", "starting") or not (judged or now.phase is Phase.VERIFYING):
            return state
        try:
            instance = self._fleet.instance(now.candidate)
        except FOREIGN:
            return state
        which = (now.id, now.restarted)
        if state == "ready" and instance and (not judged or which not in memory.instances):
            memory.instances[which] = instance
        is_another = instance and memory.instances.get(which, instance) != instance
        return "dead" if judged and is_another else state

    def _restartable(self, now: Rollout) -> bool:
        """Returns whether the candidate can be restarted: a server that runs elsewhere cannot."""
        try:
            return not now.plan.second_opinion or self._fleet.instance(now.candidate) is not None
        except FOREIGN:
            return False

    def _active_requests(self, now: Rollout) -> int | None:
        leaving = now.stable if now.phase is Phase.DRAINING else now.candidate
        drained = (Phase.DRAINING, Phase.ABORTING, Phase.WITHDRAWING, Phase.RETIRING)
        if leaving is None or now.phase not in drained:
            return None
        going = (leaving, now.baseline) if now.baseline else (leaving,)
        try:
            return sum(self._router.active_requests(release) for release in going)
        except FOREIGN as error:
            self._tell("gateway", str(error))
            return None

    def _state(self, release: Release) -> ReleaseState:
        """Returns the state of a release; one that cannot be asked is not ready."""
        if release not in self._states:
            try:
                self._states[release] = self._fleet.state(release)
            except FOREIGN as error:
                self._tell(release.name, str(error))
                self._states[release] = "starting"
        return self._states[release]

    def _unready_s(self, memory: Memory, release: Release) -> float:
        """Returns seconds since the release was last seen ready or, if it never was, since it was first observed."""
        t = self._clock.steady()
        if self._state(release) == "ready":
            memory.ready_at[release] = t
        return t - memory.ready_at.setdefault(release, t)

    # acting

    def bring(self, rollouts: Sequence[Rollout]) -> None:
        """Applies the state of `rollouts`: first starts what must run, then routes traffic, then stops what may go."""
        t = self._clock.steady()
        for now in rollouts:
            self._start_live(now, t)
            self._start_candidate(now)
            self._start_baseline(now, t)
        self._routed = self._route(rollouts, t)
        for now in rollouts:
            self._name(now, t)
            if self._routed:
                self._sweep(now, t)

    def _start_live(self, now: Rollout, t: float) -> None:
        memory = self._memory(now)
        if now.live is None or t < memory.restart.at:
            return
        state = self._state(now.live)
        if state == "ready":
            memory.ready_at[now.live] = t
            memory.restart.done()
        elif state == "absent" or (state == "dead" and t - memory.ready_at.get(now.live, 0.0) >= _DEAD_S):
            self._tell(now.live.name, f"it is live but {state}; restarting it")
            # Even if it starts: one that dies at once must not be restarted in a loop.
            memory.restart.failed(t)
            try:
                self._fleet.start(now.live)
            except FOREIGN as error:
                self._tell(now.live.name, str(error))

    def _start_candidate(self, now: Rollout) -> None:
        memory = self._memory(now)
        if now.phase is not Phase.LOADING:
            memory.problem = ""
        elif not memory.problem and self._state(now.candidate) == "absent":
            try:
                self._fleet.start(now.candidate)
            except TRANSIENT as error:
                self._tell(now.candidate.name, str(error))
            except FOREIGN as error:
                memory.problem = str(error)
            del self._states[now.candidate]

    def _start_baseline(self, now: Rollout, t: float) -> None:
        """Starts the baseline while it may be needed; one that died is restarted, since its death is not evidence."""
        memory = self._memory(now)
        needed = now.phase in (Phase.LOADING, Phase.VERIFYING, Phase.SHADOWING, Phase.SHIFTING)
        if now.baseline is None or not needed or t < memory.baseline.at:
            return
        state = self._state(now.baseline)
        if state == "ready":
            memory.baseline.done()
        elif state in ("absent", "dead"):
            memory.baseline.failed(t)
            try:
                self._fleet.start(now.baseline)
            except FOREIGN as error:
                self._tell(now.baseline.name, str(error))
                if now.phase is Phase.LOADING and not isinstance(error, TRANSIENT):
                    memory.problem = str(error)
            del self._states[now.baseline]

    def _route(self, rollouts: Sequence[Rollout], t: float) -> bool:
        wanted = sorted((now.route for now in rollouts if now.route), key=lambda route: route.model)
        endpoints = {release: self._endpoint(release) for route in wanted for release in route.releases}
        if any(endpoints[release] is None for route in wanted for release in route.judged):
            return False  # it is gone: the next decision takes its traffic away and must be journaled first
        routes = [route for route in (_reachable(route, endpoints) for route in wanted) if route]
        applied = (routes, endpoints)
        if applied == self._applied and t < self._apply_again_at:
            return True
        try:
            self._router.apply(routes)
        except FOREIGN as error:
            self._applied = None
            self._tell("gateway", str(error))
            return False
        self._applied, self._apply_again_at = applied, t + _REAPPLY_S
        self._told.pop("gateway", None)
        return True

    def _endpoint(self, release: Release) -> Endpoint | None:
        try:
            return self._fleet.endpoint(release)
        except FOREIGN:
            return None

    def _name(self, now: Rollout, t: float) -> None:
        memory = self._memory(now)
        if memory.named == now.aliases or t < memory.naming.at:
            return
        try:
            present = self._versions.aliased(now.model)
            for alias, release in now.aliases.items():
                if release and release.edition not in self._versions.editions(now.model, release.version):
                    release = None  # it may have been deleted
                if present.get(alias) != release:
                    self._versions.set_alias(now.model, alias, release.label if release else None)
        except FOREIGN as error:
            self._tell(f"aliases of {now.model}", str(error))
            memory.naming.failed(t)
        else:
            memory.named = now.aliases
            memory.naming.done()

    def _sweep(self, now: Rollout, t: float) -> None:
        """Stops releases of the model that no longer have a route."""
        memory, mark = self._memory(now), f"{now.id} {now.phase}"
        if memory.swept == mark or t < memory.sweeping.at:
            return
        try:
            extra = [r for r in self._fleet.running() if r.model == now.model and r not in now.wanted]
            for release in extra:
                self._fleet.stop(release)
        except FOREIGN as error:
            self._tell(now.model, str(error))
            memory.sweeping.failed(t)
        else:
            memory.sweeping.done()
            if not extra:  # else checked again: a stop may not be complete when it returns
                memory.swept = mark

    def _memory(self, now: Rollout) -> Memory:
        return self._memories.setdefault(now.model, Memory())

    def _tell(self, about: str, trouble: str) -> None:
        """Logs a problem once, not at every tick."""
        if self._told.get(about) != trouble:
            self._told[about] = trouble
            logger.warning(f"{about}: {trouble}")


def _reachable(route: ModelRoute, endpoints: dict[Release, Endpoint | None]) -> ModelRoute | None:
    """Returns the route without releases that have no address.

    That is a candidate that is gone and has no traffic, or a live release that cannot be started: it must not keep the
    other models from being routed.
    """
    gone = [release for release in route.releases if endpoints[release] is None]
    return None if route.stable in gone else route.without(gone)
