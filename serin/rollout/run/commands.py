"""Commands from a person or a flow to the controller: a file in its inbox, and a file with its answer.

    <home>/rollouts/inbox/<id>.json     written by `submit`, removed by the controller when it is answered
    <home>/rollouts/answers/<id>.json   kept for a week

Where the disk takes no more, both are in the stack's folder in memory instead: `abort` must not wait for a disk. Files
appear by rename, so that nobody reads a partial one. Ids sort by time: commands are applied in the order given.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self

from serin.errors import ControllerSilent, SerinError
from serin.machine.documents import read_json
from serin.machine.durable import write_whole
from serin.machine.in_memory import memory_folder
from serin.machine.typed_json import Document, checked, json2value, value2json
from serin.rollout.decide.plan import StoredPlan
from serin.spec.names import valid_model_name

logger = logging.getLogger(__name__)

Kind = Literal["start", "pause", "resume", "approve", "promote", "abort", "rollback", "retire"]

_FORM: Final = "serin.command"
INBOX, ANSWERS = "inbox", "answers"

_ID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")
_KEEP_ANSWERS_S: Final = 7 * 86400.0
_POLL_S: Final = 0.05
_PATIENCE_S: Final = 10.0


def new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Document):
    """A command for the controller.

    `version` is used by start, and by rollback (None: the one before); `plan` by start (None: the default) and by
    rollback (None: that of the last rollout).
    """

    kind: Kind
    model: str
    by: str
    version: int | None = None
    why: str = ""
    plan: StoredPlan | None = None
    id: str = field(default_factory=new_id)

    def to_json(self) -> dict[str, Any]:
        found = value2json(self)
        return {"format": _FORM, "version": 1, "release": found.pop("version"), **found}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Raises ValueError or NameInvalid for anything else than a command."""
        found = checked(document, _FORM, 1)
        version = found["version"] = found.pop("release", None)
        if version is not None and (type(version) is not int or version < 1):
            raise ValueError(f"{version!r} is not a version number")
        command = json2value(cls, found)
        valid_model_name(command.model)
        return command


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Document, form="serin.answer"):
    id: str
    accepted: bool
    reason: str
    rollout: str | None = None  # the rollout it started or changed


def valid_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Mailbox(Protocol):
    """A caller's way to a controller, now or when one next runs."""

    poll_s: float
    patience_s: float  # for how long an answer is waited for

    def submit(self, command: Command) -> str:
        """Returns the command's id."""
        ...

    def read_answer(self, command_id: str) -> Answer | None: ...

    def withdraw(self, command_id: str) -> None:
        """Takes back a command that the controller has not obeyed yet."""
        ...


class HomeMailbox:
    """The way to the controller of a home."""

    poll_s, patience_s = _POLL_S, _PATIENCE_S

    def __init__(self, home: Path) -> None:
        self._home = home

    def submit(self, command: Command) -> str:
        _publish(self._home, INBOX, command.id, command.to_json())
        return command.id

    def read_answer(self, command_id: str) -> Answer | None:
        advice = "remove it and give the command again"
        for folder in _folders(self._home, ANSWERS):
            file = folder / f"{_checked(command_id)}.json"
            if (answer := read_json(file, Answer.from_json, advice=advice)) is not None:
                return answer
        return None

    def withdraw(self, command_id: str) -> None:
        for folder in _folders(self._home, INBOX):
            (folder / f"{command_id}.json").unlink(missing_ok=True)


def ask_by(mailbox: Mailbox, command: Command, *, timeout_s: float | None = None) -> Answer:
    """Submits a command and waits for the answer. Without one the command is withdrawn, so that it is not applied
    later."""
    timeout_s = mailbox.patience_s if timeout_s is None else timeout_s
    mailbox.submit(command)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if answer := mailbox.read_answer(command.id):
            return answer
        time.sleep(mailbox.poll_s)
    mailbox.withdraw(command.id)
    if answer := mailbox.read_answer(command.id):
        return answer
    raise ControllerSilent(model=command.model, command=command.kind, waited_s=timeout_s)


def submit(home: Path, command: Command) -> str:
    """Hands `command` to the controller of `home`. Returns the command's id."""
    return HomeMailbox(home).submit(command)


def read_answer(home: Path, command_id: str) -> Answer | None:
    return HomeMailbox(home).read_answer(command_id)


def ask(home: Path, command: Command, *, timeout_s: float = _PATIENCE_S) -> Answer:
    """Asks the controller of `home`."""
    return ask_by(HomeMailbox(home), command, timeout_s=timeout_s)


def withdraw(home: Path, command_id: str) -> None:
    HomeMailbox(home).withdraw(command_id)


class Inbox:
    """The controller's side of the inbox."""

    def __init__(self, home: Path) -> None:
        self._home, self._unreadable = home, dict[Path, str]()
        for name in (INBOX, ANSWERS):
            with suppress(OSError):  # a full disk
                _folders(home, name)[0].mkdir(parents=True, exist_ok=True)
        for file in self._files(ANSWERS):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > _KEEP_ANSWERS_S:
                    file.unlink(missing_ok=True)

    def pending(self) -> list[Command]:
        """Returns the waiting commands, oldest first. A file that is not a command is refused at once."""
        commands = []
        for file in self._files(INBOX):
            if any((folder / file.name).exists() for folder in _folders(self._home, ANSWERS)):
                file.unlink(missing_ok=True)  # a crash came between the answer and the removal
                continue
            try:
                command = Command.load(file.read_bytes())
                if command.id != file.stem:
                    raise ValueError(f"its id {command.id!r} differs from its file name")
            except FileNotFoundError:
                continue  # withdrawn in the meantime
            except OSError as error:
                if self._unreadable.get(file) != str(error):
                    self._unreadable[file] = str(error)
                    logger.warning(f"{file} cannot be read and is left as it is: {error}; remove it")
            except (ValueError, SerinError) as error:
                self._refuse(file, f"not a command: {error}")
            else:
                commands.append(command)
        return commands

    def answer(self, answer: Answer) -> None:
        """Publishes the answer, then removes the command: a crash between the two only answers again."""
        _publish(self._home, ANSWERS, answer.id, answer.to_json())
        for folder in _folders(self._home, INBOX):
            (folder / f"{answer.id}.json").unlink(missing_ok=True)

    def _refuse(self, file: Path, reason: str) -> None:
        if _ID.fullmatch(file.stem):
            self.answer(Answer(id=file.stem, accepted=False, reason=reason))
        file.unlink(missing_ok=True)

    def _files(self, name: str) -> list[Path]:
        found = (file for folder in _folders(self._home, name) for file in folder.glob("*.json"))
        return sorted(found, key=lambda file: file.name)


def _folders(home: Path, name: str) -> list[Path]:
    """Returns where the files are: on disk, and in memory where a stack was started."""
    memory = memory_folder(home)
    return [home / "rollouts" / name, *([memory / name] if memory else [])]


def _checked(command_id: str) -> str:
    if not _ID.fullmatch(command_id):
        raise ValueError(f"{command_id!r} is not a command id")
    return command_id


def _publish(home: Path, name: str, command_id: str, value: Mapping[str, Any]) -> None:
    """Writes the file to the first folder that takes it."""
    *others, last = _folders(home, name)
    for folder in others:
        with suppress(OSError):
            _write(folder / f"{_checked(command_id)}.json", value)
            return
    _write(last / f"{_checked(command_id)}.json", value)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value))
