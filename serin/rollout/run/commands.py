"""Commands from a person or a flow to the controller that decides, and its answers.

    rollouts/inbox/<model>.<id>.json       written by `Mailbox.submit`, removed by the controller when it is answered
    rollouts/approvals/<model>.<id>.json   the same, for commands that give traffic by themselves (`Command.box`)
    rollouts/answers/<model>.<id>.json     kept for a week

All are objects: of the home of one machine's stack, or of the store that several hosts share. A store's own rules can
let one credential write to the inbox and another one to the approvals, for models whose names begin alike. Where a
home's disk is full, they are kept in memory: `abort` must not wait for a disk. Ids sort by time: commands are applied
in that order.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Self

from serin.errors import ControllerSilent, SerinError
from serin.machine.audit import one_line
from serin.machine.documents import parse_json
from serin.machine.typed_json import Document, checked, json2value, value2json
from serin.rollout.decide.plan import StoredPlan
from serin.spec.names import valid_model_name
from serin.store.artifacts import Release
from serin.store.objects import FolderObjects, Objects

logger = logging.getLogger(__name__)

Kind = Literal["start", "pause", "resume", "approve", "promote", "abort", "rollback", "retire"]

_FORM: Final = "serin.command"
INBOX, APPROVALS, ANSWERS = "inbox", "approvals", "answers"

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,62}\.[0-9A-Za-z-]{1,64}")
_TIME: Final = "%Y%m%dT%H%M%S"
_KEEP_ANSWERS: Final = timedelta(days=7)


def new_id() -> str:
    return f"{datetime.now(UTC):{_TIME}%f}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Document):
    """A command for the controller.

    `version` with the `edition` of its lookups is what start begins and rollback returns to (None: the one before); of
    others it is the one that must be rolled out now (None: any). `plan` is used by start (None: the default) and by
    rollback (None: that of the last rollout). `rollout`: the id of the model's newest rollout, as it was seen; the
    controller refuses the command when another one has begun. None: any.
    """

    kind: Kind
    model: str
    by: str
    version: int | None = None
    edition: int = 1
    why: str = ""
    plan: StoredPlan | None = None
    rollout: str | None = None
    id: str = field(default_factory=new_id)

    @property
    def name(self) -> str:
        """The name of its object. That of the answer is the same, so nobody answers for another model."""
        return command_name(self.model, self.id)

    @property
    def box(self) -> str:
        """Where it is written. A version gets traffic by an approval, also where it is called by another name: without
        asking for evidence, or as one to return to."""
        names_version = self.kind == "rollback" and self.version is not None
        return APPROVALS if self.kind in ("approve", "promote") or names_version else INBOX

    @property
    def release(self) -> Release | None:
        """The release that it names; None when it names none."""
        if self.version is None:
            return None
        return Release(model=self.model, version=self.version, edition=self.edition)

    def to_json(self) -> dict[str, Any]:
        fields = value2json(self)
        return {"format": _FORM, "version": 1, "release": fields.pop("version"), **fields}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Raises ValueError or NameInvalid for anything else than a command."""
        fields = checked(document, _FORM, 1)
        version = fields["version"] = fields.pop("release", None)
        if version is not None and (type(version) is not int or version < 1):
            raise ValueError(f"{version!r} is not a version number")
        command = json2value(cls, fields)
        valid_model_name(command.model)
        if command.edition < 1:
            raise ValueError(f"{command.edition!r} is not the number of an edition")
        return replace(command, by=one_line(command.by), why=one_line(command.why))  # they reach logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Document, form="serin.answer"):
    """`id`: the name of the command."""

    id: str
    accepted: bool
    reason: str
    rollout: str | None = None  # the rollout it started or changed


def _key(box: str, name: str) -> str:
    return f"rollouts/{box}/{name}.json"


class Mailbox:
    """A caller's way to the controller that leads, now or when one next runs."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        # Of several hosts: a change of the leader takes up to ten seconds.
        self._poll_s, self._patience_s = (0.05, 10.0) if isinstance(objects, FolderObjects) else (0.2, 30.0)

    def submit(self, command: Command) -> str:
        """Returns the command's id. Submitting a command again changes nothing."""
        self._objects.put(_key(command.box, _valid_name(command.name)), command.dump())
        return command.id

    def read_answer(self, name: str) -> Answer | None:
        path, advice = _key(ANSWERS, _valid_name(name)), "remove it and give the command again"
        stored = self._objects.read(path)
        return None if stored is None else parse_json(path, stored.content, Answer.from_json, advice=advice)

    def withdraw(self, command: Command) -> None:
        """Takes back a command that the controller has not obeyed yet."""
        self._objects.remove(_key(command.box, _valid_name(command.name)))

    def ask(self, command: Command, *, timeout_s: float | None = None) -> Answer:
        """Submits a command and waits for the answer. Without one the command is withdrawn, so that it is not applied
        later."""
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        self.submit(command)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if answer := self.read_answer(command.name):
                return answer
            time.sleep(self._poll_s)
        self.withdraw(command)
        if answer := self.read_answer(command.name):
            return answer
        raise ControllerSilent(model=command.model, command=command.kind, waited_s=timeout_s)


class Inbox:
    """The controller's side. `check` raises where this controller may not answer any more."""

    def __init__(self, objects: Objects, check: Callable[[], None] = lambda: None) -> None:
        self._objects, self._check = objects, check
        self._unreadable: dict[str, str] = {}
        before = f"{datetime.now(UTC) - _KEEP_ANSWERS:{_TIME}}"
        for name in self._names(ANSWERS):
            own = name.rpartition(".")[2]
            made_here = own[:8].isdecimal() and own[8:9] == "T"  # an id that somebody else made up stays
            if made_here and own[: len(before)] < before:
                with suppress(OSError):
                    self._objects.remove(_key(ANSWERS, name))

    def _names(self, box: str) -> list[str]:
        prefix = _key(box, "").removesuffix(".json")
        names = (key.removeprefix(prefix).removesuffix(".json") for key in self._objects.keys(prefix))
        return [name for name in names if "/" not in name]  # else a model has the name of this folder

    def pending(self) -> list[Command]:
        """Returns the waiting commands, oldest first. What is not a command is refused at once."""
        found = [(box, name) for box in (INBOX, APPROVALS) for name in self._names(box)]
        waiting = (self._read(box, name) for box, name in found)
        return sorted((command for command in waiting if command), key=lambda command: command.id)

    def _read(self, box: str, name: str) -> Command | None:
        """Returns a command that is to be obeyed; None for everything else."""
        try:
            stored = self._objects.read(_key(box, name))
            answered = _NAME.fullmatch(name) and self._objects.read(_key(ANSWERS, name)) is not None
        except OSError as error:
            if self._unreadable.get(name) != str(error):
                self._unreadable[name] = str(error)
                logger.warning(f"a command cannot be read and is left as it is: {error}; remove it")
            return None
        if stored is None:
            return None  # withdrawn in the meantime
        if answered:
            self._objects.remove(_key(box, name))  # a crash came between the answer and the removal
            return None
        try:
            command = Command.load(stored.content)
            if command.name != name:
                raise ValueError(f"it is {command.name!r}, which differs from its object's name")
            if command.box != box:
                raise ValueError(f"{command.kind} is taken from rollouts/{command.box}/ alone")
        except (ValueError, SerinError) as error:
            self._refuse(box, name, f"not a command: {error}")
            return None
        return command

    def answer(self, answer: Answer) -> None:
        """Publishes the answer, then removes the command: a crash between the two only answers again."""
        self._check()
        self._objects.put(_key(ANSWERS, _valid_name(answer.id)), answer.dump())
        for box in (INBOX, APPROVALS):
            self._objects.remove(_key(box, answer.id))

    def _refuse(self, box: str, name: str, reason: str) -> None:
        if _NAME.fullmatch(name):
            self.answer(Answer(id=name, accepted=False, reason=reason))
        else:
            self._objects.remove(_key(box, name))


def command_name(model: str, command_id: str) -> str:
    return f"{model}.{command_id}"


def _valid_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a command")
    return name
