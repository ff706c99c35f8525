"""Commands to the leading controller, and its answers, as objects in the store.

    rollouts/inbox/<id>.json     written by `submit`, removed by the controller when it is answered
    rollouts/answers/<id>.json   kept for a week

The same meaning as in rollout/run/commands.py.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from serin.errors import ObjectExists, SerinError
from serin.rollout.run.commands import Answer, Command, valid_id
from serin.rollout.run.leadership import Leadership
from serin.store.objects import Objects

INBOX: Final = "rollouts/inbox/"
ANSWERS: Final = "rollouts/answers/"

_KEEP_ANSWERS: Final = timedelta(days=7)


class StoreMailbox:
    """A caller's side."""

    poll_s, patience_s = 0.2, 30.0  # a change of the leader takes up to ten seconds

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def submit(self, command: Command) -> str:
        try:
            self._objects.create(_key(INBOX, command.id), command.dump())
        except ObjectExists:
            return command.id  # submitted before
        return command.id

    def read_answer(self, command_id: str) -> Answer | None:
        found = self._objects.read(_key(ANSWERS, command_id))
        return Answer.load(found.content) if found else None

    def withdraw(self, command_id: str) -> None:
        self._objects.remove(_key(INBOX, command_id))


class StoreInbox:
    """The leading controller's side."""

    def __init__(self, objects: Objects, leadership: Leadership, term: int) -> None:
        self._objects, self._leadership, self._term = objects, leadership, term
        self._remove_old_answers()

    def pending(self) -> list[Command]:
        """Returns the waiting commands, oldest first. An object that is not a command is refused at once."""
        commands = []
        for key in self._objects.keys(INBOX):
            name = key.removeprefix(INBOX).removesuffix(".json")
            if "/" in name:
                continue  # a model has the name of this folder
            found = self._objects.read(key)
            if found is None:
                continue  # withdrawn in the meantime
            if valid_id(name) and self._objects.read(_key(ANSWERS, name)):
                self._objects.remove(key)  # a crash came between the answer and the removal
                continue
            try:
                command = Command.load(found.content)
                if command.id != name:
                    raise ValueError(f"its id {command.id!r} differs from its name")
            except (ValueError, SerinError) as error:
                self._refuse(name, f"not a command: {error}")
            else:
                commands.append(command)
        return commands

    def answer(self, answer: Answer) -> None:
        """Publishes the answer, then removes the command: a crash between the two only answers again."""
        self._leadership.check(self._term)
        self._objects.put(_key(ANSWERS, answer.id), answer.dump())
        self._objects.remove(_key(INBOX, answer.id))

    def _refuse(self, name: str, reason: str) -> None:
        if valid_id(name):
            self.answer(Answer(id=name, accepted=False, reason=reason))
        else:
            self._objects.remove(f"{INBOX}{name}.json")

    def _remove_old_answers(self) -> None:
        """Removes answers by the time in their id; an id that somebody else made up stays."""
        before = f"{datetime.now(UTC) - _KEEP_ANSWERS:%Y%m%dT%H%M%S}"
        for key in self._objects.keys(ANSWERS):
            name = key.removeprefix(ANSWERS)
            if name[:8].isdecimal() and name[8:9] == "T" and name[:15] < before:
                self._objects.remove(key)


def _key(prefix: str, command_id: str) -> str:
    if not valid_id(command_id):
        raise ValueError(f"{command_id!r} is not a command id")
    return f"{prefix}{command_id}.json"
