"""Returns a model to its previous version without a person, at most once for each version, through the controller."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from serin.monitoring.rollbacks import Rollback, read_rollbacks, refusal, save_rollbacks
from serin.rollout.decide.plan import Plan
from serin.rollout.run.commands import Command, command_name, new_id
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import ModelStatus
from serin.watcher.duty import Commit, nothing
from serin.watcher.served import watched_rollouts

log = logging.getLogger(__name__)

_ANSWER_S: Final = 60.0
_AGAIN_S: Final = 600.0  # after a command that was refused or not answered


class AutoRollback:
    """A rollback is stored, then submitted as `serin rollout rollback` does. After a crash between the two the same
    command is submitted again; the controller obeys it once."""

    def __init__(self, home: Path, state: Path | None = None, commit: Commit = nothing) -> None:
        """`state`: the home where rollbacks are stored; None: `home`. `commit`: called before one is submitted."""
        self._home, self._state, self._commit = home, state or home, commit

    def refusal(self, model: ModelStatus, now: float) -> str | None:
        """Returns why the live version must not be rolled back automatically now, or None."""
        made = read_rollbacks(self._state, model.name)
        if made and not made[-1].accepted and abs(now - made[-1].t) < _AGAIN_S:
            return (
                f"a rollback was tried a moment ago: {made[-1].outcome or 'the controller has not answered'}"
            )
        running = model.rollout.running
        return refusal(made, live=model.live_release, previous=model.previous_release, rollout_runs=running)

    def begin(self, model: ModelStatus, *, why: str, by: str, now: float) -> None:
        """Asks the controller to return to the previous version. `refusal` must have been None."""
        live, previous = model.live_release, model.previous_release
        assert live is not None
        assert previous is not None
        rollback = Rollback(
            t=now,
            from_version=live.version,
            from_edition=live.edition,
            to_version=previous.version,
            to_edition=previous.edition,
            by=by,
            why=why,
            command=new_id(),
        )
        save_rollbacks(self._state, model.name, (*read_rollbacks(self._state, model.name), rollback))
        log.warning("%s: returning from version %s to %s: %s", model.name, live.label, previous.label, why)
        self._commit()
        watched_rollouts(self._home).mailbox.submit(self._command(model.name, rollback))

    def settle(self, model: ModelStatus, now: float) -> None:
        """Stores the controller's answer to the last rollback. Without one in time, or when another version has become
        live, the command is withdrawn, so that it is not obeyed later."""
        made = read_rollbacks(self._state, model.name)
        if not made or made[-1].outcome is not None:
            return
        last = made[-1]
        name = command_name(model.name, last.command)
        answer = watched_rollouts(self._home).mailbox.read_answer(name)
        from_live = (model.live, model.live_edition) == (last.from_version, last.from_edition)
        current = from_live and not model.rollout.running
        if answer is None and current and abs(now - last.t) < _ANSWER_S:
            self._commit()
            watched_rollouts(self._home).mailbox.submit(self._command(model.name, last))
            return
        if answer is None:
            watched_rollouts(self._home).mailbox.withdraw(self._command(model.name, last))
            if abs(now - last.t) < _ANSWER_S:
                return  # it may have been obeyed a moment ago
            answer = watched_rollouts(self._home).mailbox.read_answer(name)
        outcome = "the controller did not answer" if answer is None else answer.reason
        accepted = answer is not None and answer.accepted
        settled = replace(last, outcome=outcome, accepted=accepted)
        save_rollbacks(self._state, model.name, (*made[:-1], settled))
        if not accepted:
            log.warning("%s: the automatic rollback did not begin: %s", model.name, outcome)

    def _command(self, model: str, rollback: Rollback) -> Command:
        return Command(
            kind="rollback",
            model=model,
            version=rollback.to_version,
            edition=rollback.to_edition,
            by=rollback.by,
            why=rollback.why,
            plan=self._plan(model),
            id=rollback.command,
        )

    def _plan(self, model: str) -> Plan:
        """The last rollout's plan. If the version it returns to is bad too, the bake asks a person instead of going
        back and forth."""
        decision = watched_rollouts(self._home).last(model)
        assert decision is not None, "a model with a live version has a journal"
        return replace(decision2rollout(decision).plan, mode="hold")
