"""The controller loop: apply the journals' state, observe, decide, journal, act. One tick at a time.

It may be killed at any point, and the next one resumes from the journals: a decision is on disk before it is acted on,
every action may be repeated, and there is no action that no journal records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from serin.errors import RolloutRefused
from serin.rollout.decide.advance import advance
from serin.rollout.decide.state import CONTROLLER, Phase, Rollout
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Answer, Command
from serin.rollout.run.compaction import worth_keeping
from serin.rollout.run.ports import (
    Clock,
    Commands,
    EvenClock,
    Fleet,
    Journal,
    Journals,
    Judge,
    Replayer,
    Router,
    Versions,
)
from serin.rollout.run.reconciler import Reconciler
from serin.rollout.run.record import decision2rollout, rollout2decision
from serin.rollout.run.shadow import Shadows
from serin.rollout.run.verification import FOREIGN, Beside
from serin.store.artifacts import Release

logger = logging.getLogger(__name__)

_RECORD_S: Final = 10.0  # evidence that grows without a decision is journaled this often


@dataclass(slots=True)
class Course:
    """A model's newest rollout, and the journal it is recorded in."""

    journal: Journal
    rollout: Rollout | None
    recorded_at: float
    obeyed: set[str]  # ids of commands


class Controller:
    """Owns the journals it has opened until it is closed or its process ends."""

    def __init__(
        self,
        *,
        router: Router,
        fleet: Fleet,
        judge: Judge,
        journals: Journals,
        versions: Versions,
        commands: Commands,
        clock: Clock | None = None,
        beside: Beside | None = None,
        replayer: Replayer | None = None,
        check: Callable[[Release], None] | None = None,
    ) -> None:
        """`check` raises a SerinError for a release that must not be rolled out, before its rollout begins."""
        self._clock, self._shadows = clock or EvenClock(), Shadows(replayer)
        self._world = Reconciler(
            router=router,
            fleet=fleet,
            judge=judge,
            versions=versions,
            clock=self._clock,
            shadows=self._shadows,
            beside=beside,
        )
        self._journals, self._versions, self._commands = journals, versions, commands
        self._check = check or (lambda _: None)
        self._courses: dict[str, Course] = {}
        try:
            for model in journals.models():
                self._open(model)
        except BaseException:
            self.close()
            raise

    def tick(self) -> None:
        """Runs one round for all models. Raises OSError when a decision cannot be recorded; then it was not acted
        on."""
        self._world.look_again()
        if all(rollout.phase.final for rollout in self.rollouts()):
            self._clock.follow()
        self._world.bring(self.rollouts())
        commanded = set()
        for command in self._commands.pending():
            if self._obey(command):
                commanded.add(command.model)
        for model, course in self._courses.items():
            if model not in commanded:
                self._decide(course)
        self._world.bring(self.rollouts())

    def affirm(self) -> None:
        """Records the state of every open rollout again.

        Where several controllers share the journals, one that led before loses the race for its next decision.
        """
        t = self._clock.now()
        for course in self._courses.values():
            if course.rollout is not None and not course.rollout.phase.final:
                self._record(course, replace(course.rollout, by=CONTROLLER), t)

    def rollouts(self) -> list[Rollout]:
        """Returns the newest rollout of each model."""
        return [course.rollout for course in self._courses.values() if course.rollout]

    def close(self) -> None:
        """Releases the journals and stops replays. Running releases and routes stay as they are."""
        self._shadows.close()
        for course in self._courses.values():
            course.journal.close()
        self._courses.clear()

    def _open(self, model: str) -> Course:
        journal = self._journals.open(model)
        self._courses[model] = course = Course(journal=journal, rollout=None, recorded_at=0.0, obeyed=set())
        decisions = journal.all()
        if decisions:
            course.rollout = decision2rollout(decisions[-1])
            course.recorded_at = decisions[-1].t
            if not course.rollout.phase.final and self._clock.now() < decisions[-1].t:
                self._clock.follow(
                    not_before=decisions[-1].t
                )  # the machine's clock was set back in the meantime
            course.obeyed = {decision.command for decision in decisions if decision.command}
        return course

    def _obey(self, command: Command) -> bool:
        """Answers a command; True when it was applied now. A command that was applied before a crash is only
        answered."""
        course = self._courses.get(command.model)
        now = course.rollout if course else None
        if course and now and command.id in course.obeyed:
            self._commands.answer(Answer(id=command.id, accepted=True, reason=now.reason, rollout=now.id))
            return False
        t = self._clock.now()
        try:
            then = apply_command(now, command, t)
            self._check_possible(command, then)
        except FOREIGN as error:
            self._commands.answer(Answer(id=command.id, accepted=False, reason=str(error)))
            return False
        self._record(course or self._open(command.model), then, t, command=command.id)
        self._commands.answer(Answer(id=command.id, accepted=True, reason=then.reason, rollout=then.id))
        return True

    def _check_possible(self, command: Command, then: Rollout) -> None:
        version = then.candidate.version
        if command.kind == "retire":  # also a version that was removed must be stopped
            return
        if then.id == command.id and version not in self._versions.versions(command.model):
            reason = f"version {version} is not in the store"
            raise RolloutRefused(model=command.model, command=command.kind, reason=reason)
        if then.id == command.id:
            self._check(then.candidate)
            self._shadows.check(then)

    def _decide(self, course: Course) -> None:
        now = course.rollout
        if now is None or now.phase.final:
            return
        t = self._clock.now()
        then = advance(now, self._world.see(now, t), t)
        grown = then.evidence != now.evidence and t - course.recorded_at >= _RECORD_S
        if then.milestone != now.milestone or grown:
            self._record(course, then, t)
        course.rollout = then

    def _record(self, course: Course, then: Rollout, t: float, *, command: str | None = None) -> None:
        """Records a decision. Until this returns, the decision was not made."""
        changed = course.rollout is None or then.milestone != course.rollout.milestone
        course.journal.append(rollout2decision(then, t, command=command))
        if command:
            course.obeyed.add(command)
        course.rollout, course.recorded_at = then, t
        if changed:
            logger.info(_line(then))
        self._compact(course.journal, then.model)

    def _compact(self, journal: Journal, model: str) -> None:
        """Compacts a large journal. If that fails, the journal stays as it is: no decision waits for it."""
        try:
            journal.compact(worth_keeping)
        except OSError as error:
            logger.warning(f"the journal of {model} could not be compacted: {error}")


def _line(now: Rollout) -> str:
    step = f" at {now.weight_percent:g}%" if now.phase is Phase.SHIFTING else ""
    held = f", held ({now.hold})" if now.hold else ""
    return f"{now.candidate.name}: {now.phase}{step}{held}: {now.reason}"
