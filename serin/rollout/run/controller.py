"""The controller loop: apply the journals' state, observe, decide, journal, act. One tick at a time.

It may be killed at any point, and the next one resumes from the journals: a decision is on disk before it is acted on,
every action may be repeated, and there is no action that no journal records. Only going back to the live release does
not wait for a full disk: that decision is kept in memory until the disk takes it.

What fails for one model is a problem of that model (`problems`), and the others are looked at as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from serin.errors import JournalHeld, LeadershipLost, RolloutRefused, SerinError, StoreUnreachable
from serin.formats.serving.journal import Decision
from serin.rollout.decide.advance import advance
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import CONTROLLER, Phase, Rollout, Verdict, abort
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Answer, Command, Inbox
from serin.rollout.run.ports import (
    EvenClock,
    Fleet,
    Journal,
    Journals,
    Judge,
    Replayer,
    Router,
    Versions,
)
from serin.rollout.run.reconciler import Lacks, Reconciler
from serin.rollout.run.record import decision2rollout, lost_advice, rollout2decision
from serin.rollout.run.shadow import Shadows
from serin.rollout.run.verification import FOREIGN, Beside
from serin.store.artifacts import Release

logger = logging.getLogger(__name__)

# Evidence that grows without a decision is journaled this often, and that of a candidate with traffic also when it does
# not grow: is the disk still there?
_RECORD_S, _SAME_S = 10.0, 30.0
_UNRECORDED_S: Final = 30.0  # a candidate whose decisions cannot be recorded for so long loses its traffic
_OPEN_AGAIN_S: Final = 5.0
_TURNS: Final = 500  # of one rollout: holds that come and go
_POINTS: Final = (20, 200)  # evidence over time: of an earlier rollout, of the newest


@dataclass(slots=True)
class Course:
    """A model's newest rollout, and the journal it is recorded in."""

    journal: Journal
    rollout: Rollout | None
    recorded_at: float
    obeyed: set[str]  # ids of commands
    failing_since: float | None = None  # since when its decisions cannot be recorded


class Controller:
    """Decides about the models whose journals it has opened."""

    def __init__(
        self,
        *,
        router: Router,
        fleet: Fleet,
        judge: Judge,
        journals: Journals,
        versions: Versions,
        commands: Inbox,
        clock: EvenClock | None = None,
        beside: Beside | None = None,
        replayer: Replayer | None = None,
        check: Callable[[Release], None] | None = None,
        approval: Callable[[], bool] | None = None,
        lacks: Lacks = lambda _: "",
    ) -> None:
        """`check` raises a SerinError for a release that must not be rolled out, before its rollout begins. `approval`:
        whether every rollout needs one, whatever its plan says. `lacks`: see Lacks."""
        self._clock, self._shadows = clock or EvenClock(), Shadows(replayer)
        self._world = Reconciler(
            router=router,
            fleet=fleet,
            judge=judge,
            versions=versions,
            clock=self._clock,
            shadows=self._shadows,
            beside=beside,
            lacks=lacks,
        )
        self._journals, self._versions, self._commands = journals, versions, commands
        self._check, self._approval = check or (lambda _: None), approval or (lambda: False)
        self._courses: dict[str, Course] = {}
        self._unread: dict[str, SerinError | OSError] = {}  # models without a journal that can be used ...
        self._lost: dict[str, Rollout] = {}  # ... with what the store says is live of them
        self._open_again_at = 0.0
        self.problems: dict[str, str] = {}
        """By model: what keeps it from being decided about, or its decisions from being recorded."""
        self._open_all()

    def tick(self) -> None:
        """Runs one round for all models. A decision that cannot be recorded is not acted on, unless it goes back to the
        live release."""
        self._world.look_again()
        if self._clock.steady() >= self._open_again_at:
            self._open_all()
        if all(rollout.phase.final for rollout in self.rollouts()):
            self._clock.follow()
        self._world.bring(self.rollouts())
        commanded = set()
        for command in self._commands.pending():
            with self._contained(command.model):
                if self._obey(command):
                    commanded.add(command.model)
        for model, course in self._courses.items():
            if model not in commanded:
                with self._contained(model):
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
        """Returns the newest rollout of each model. A model without a usable journal keeps its live version."""
        known = {model: course.rollout for model, course in self._courses.items() if course.rollout}
        return [*known.values(), *(found for model, found in self._lost.items() if model not in known)]

    def close(self) -> None:
        """Stops replays. Running releases and routes stay as they are."""
        self._shadows.close()
        self._courses.clear()

    def _open_all(self) -> None:
        """Opens the journals that are not open. One that cannot be used harms its own model alone."""
        self._open_again_at = self._clock.steady() + _OPEN_AGAIN_S
        for model in self._journals.models():
            if model not in self._courses:
                self._try_to_open(model)
        known = {model for model, course in self._courses.items() if course.rollout}
        for model in self._world.running_models() - known - self._unread.keys():
            reason = f"a release of it runs and its journal has no decision; {lost_advice(model)}"
            self._unread[model] = RolloutRefused(model=model, command="rollout", reason=reason)
            self._report(model, self._unread[model])
        for model in self._unread:
            self._look_up_live(model)

    def _try_to_open(self, model: str) -> Course | None:
        try:
            course = self._open(model)
        except (JournalHeld, LeadershipLost, StoreUnreachable):
            raise
        except FOREIGN as error:
            self._unread[model] = error
            self._report(model, error)
            return None
        if course.rollout:
            self._found(model)
        return course

    def _found(self, model: str) -> None:
        self._lost.pop(model, None)
        if self._unread.pop(model, None):
            self._settled(model)

    def _open(self, model: str) -> Course:
        journal = self._journals.open(model)
        course = Course(journal=journal, rollout=None, recorded_at=0.0, obeyed=set())
        decisions = journal.all()
        course.rollout = decision2rollout(decisions[-1]) if decisions else None
        self._courses[model] = course
        if decisions and course.rollout:
            course.recorded_at = decisions[-1].t
            if not course.rollout.phase.final and self._clock.now() < decisions[-1].t:
                # The machine's clock was set back in the meantime.
                self._clock.follow(not_before=decisions[-1].t)
            course.obeyed = {decision.command for decision in decisions if decision.command}
        return course

    def _look_up_live(self, model: str) -> None:
        """Finds the state of a model of which only the store knows what is live. Nothing is decided about it."""
        try:
            aliases = self._versions.aliased(model)
        except FOREIGN:
            return
        if "live" not in aliases:
            self._lost.pop(model, None)
            return
        self._lost[model] = Rollout(
            id="",
            candidate=aliases["live"],
            stable=aliases.get("previous"),
            previous=None,
            plan=Plan(),
            phase=Phase.PROMOTED,
            began=0.0,
            since=0.0,
            evidence_from=0.0,
        )

    @contextmanager
    def _contained(self, model: str) -> Iterator[None]:
        try:
            yield
        except (LeadershipLost, StoreUnreachable):
            raise
        except FOREIGN as error:
            self._report(model, error)

    def _report(self, model: str, error: Exception) -> None:
        if self.problems.get(model) != str(error):
            self.problems[model] = str(error)
            logger.warning(f"{model}: {error}")

    def _settled(self, model: str) -> None:
        if self.problems.pop(model, None):
            logger.info(f"{model}: it is decided about and recorded as usual again")

    def _obey(self, command: Command) -> bool:
        """Answers a command; True when it was applied now. A command that was applied before a crash is only
        answered."""
        course = self._courses.get(command.model)
        if course is None and command.model in self._journals.models():
            course = self._try_to_open(command.model)
        now = course.rollout if course else None
        if course and now and command.id in course.obeyed:
            self._commands.answer(Answer(id=command.name, accepted=True, reason=now.reason, rollout=now.id))
            return False
        t = self._clock.now()
        try:
            if course is None and command.model in self._unread and command.model in self._journals.models():
                raise self._unread[command.model]  # where there is none, a new one may begin
            then = apply_command(now, self._with_approval(command), t)
            self._check_possible(command, then)
            self._record(course or self._open(command.model), then, t, command=command.id)
        except (LeadershipLost, StoreUnreachable):
            raise
        except FOREIGN as error:
            logger.info(f"{command.kind} {command.model} by {command.by} is refused: {error}")
            self._commands.answer(Answer(id=command.name, accepted=False, reason=str(error)))
            return False
        self._commands.answer(Answer(id=command.name, accepted=True, reason=then.reason, rollout=then.id))
        return True

    def _with_approval(self, command: Command) -> Command:
        """Adds the first step to those that its plan asks a person about, where every rollout needs an approval."""
        if command.kind != "start" or not self._approval():
            return command
        plan = command.plan or Plan()
        return replace(command, plan=replace(plan, approve=(plan.steps[0], *plan.approve)))

    def _check_possible(self, command: Command, then: Rollout) -> None:
        wanted = then.candidate
        if command.kind == "retire":  # also a version that was removed must be stopped
            return
        if then.id == command.id and wanted.edition not in self._versions.editions(
            command.model, wanted.version
        ):
            reason = f"version {wanted.label} is not in the store"
            raise RolloutRefused(model=command.model, command=command.kind, reason=reason)
        if then.id == command.id:
            self._check(then.candidate)
            self._shadows.check(then)

    def _decide(self, course: Course) -> None:
        now = course.rollout
        if course.journal.waiting:
            self._flush(course)
        if now is None or now.phase.final:
            return
        t = self._clock.now()
        then = advance(now, self._world.see(now, t), t)
        changed = then.milestone != now.milestone
        every_s = _RECORD_S if then.evidence != now.evidence else _SAME_S
        if changed or ((now.weight_percent or every_s < _SAME_S) and t - course.recorded_at >= every_s):
            try:
                self._record(course, then, t)
            except OSError as error:
                self._report(now.model, error)
                course.rollout = now if changed else then  # it is judged in memory
                self._go_back_unrecorded(course, t, error)
        else:
            course.rollout = then

    def _go_back_unrecorded(self, course: Course, t: float, error: OSError) -> None:
        """A candidate must not keep its traffic for long while nothing of its rollout can be recorded."""
        now = course.rollout
        course.failing_since = t if course.failing_since is None else course.failing_since
        judged = now is not None and now.phase in (Phase.SHIFTING, Phase.BAKING) and now.stable is not None
        if now and judged and now.plan.mode == "enforce" and t - course.failing_since >= _UNRECORDED_S:
            reason = f"its decisions could not be recorded for {_UNRECORDED_S:.0f} s: {error}"
            self._record(course, abort(now, t, reason, verdict=Verdict.INCIDENT), t)

    def _flush(self, course: Course) -> None:
        try:
            course.journal.flush()
        except OSError as error:
            if now := course.rollout:
                count = course.journal.waiting
                what = f"{count} decision{'s' if count > 1 else ''} about it (now {now.phase}: {now.reason})"
                self._report(now.model, OSError(f"{what} cannot be recorded yet: {error}"))
        else:
            course.failing_since = None
            if course.rollout:
                self._settled(course.rollout.model)

    def _record(self, course: Course, then: Rollout, t: float, *, command: str | None = None) -> None:
        """Records a decision. Until this returns, the decision was not made."""
        now = course.rollout
        changed = now is None or then.milestone != now.milestone
        urgent = now is not None and _goes_back(now, then)
        course.journal.append(rollout2decision(then, t, command=command), urgent=urgent)
        if command:
            course.obeyed.add(command)
        course.rollout, course.recorded_at = then, t
        self._found(then.model)
        if changed:
            step = f" at {then.weight_percent:g}%" if then.phase is Phase.SHIFTING else ""
            held = f", held ({then.hold})" if then.hold else ""
            logger.info(f"{then.candidate.name}: {then.phase}{step}{held}: {then.reason}")
        if course.journal.waiting:
            self._flush(course)  # says why
        else:
            course.failing_since = None
            self._settled(then.model)
            try:
                course.journal.compact(worth_keeping)
            except OSError as error:  # it stays as it is: no decision waits for that
                logger.warning(f"the journal of {then.model} could not be compacted: {error}")


def _goes_back(now: Rollout, then: Rollout) -> bool:
    """Whether a decision takes traffic from the candidate of a rollout, or ends that."""
    less = then.weight_percent < now.weight_percent
    return then.id == now.id and (less or then.phase in (Phase.ABORTING, Phase.ROLLED_BACK))


# A rollout that is held accumulates evidence as long as it is held. A controller resumes from the newest line; `report`
# and `replay` need the turning points, and the evidence at some times between them.
def worth_keeping(decisions: Sequence[Decision]) -> set[int]:
    """Returns the numbers of the decisions to keep.

    Every command and every change of phase, step, weights or plan is kept, and the newest decision.
    """
    rollouts = [list(rows) for _, rows in groupby(decisions, key=lambda decision: decision.rollout)]
    return {seq for rows in rollouts for seq in _of_one(rows, points=_POINTS[rows[-1] is rollouts[-1][-1]])}


def _of_one(rows: Sequence[Decision], *, points: int) -> Iterator[int]:
    turns, rest = [], []
    before: Decision | None = None
    for row in rows:
        if before is None or row.command or _course(row) != _course(before):
            yield row.seq
        elif row.state.get("hold") != before.state.get("hold"):
            turns.append(row)
        else:
            rest.append(row)
        before = row
    yield rows[-1].seq
    yield from _spread(turns, _TURNS)
    yield from _spread(rest, points)


def _course(row: Decision) -> tuple[object, ...]:
    return row.phase, row.step, row.state.get("epoch"), row.state.get("approved"), row.state.get("plan")


def _spread(rows: Sequence[Decision], most: int) -> Iterator[int]:
    """Returns at most `most` rows, spread evenly over time and not over their number: old ones must not go first."""
    if len(rows) <= most:
        yield from (row.seq for row in rows)
        return
    begin, span = rows[0].t, (rows[-1].t - rows[0].t) or 1.0
    by_time = {min(int(most * (row.t - begin) / span), most - 1): row.seq for row in rows}
    yield from by_time.values()
