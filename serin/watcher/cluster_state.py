"""What the watchers of several hosts know together: where it is, how people read it, and how they change it.

    cluster/watcher.json                          which watcher leads (formats/cluster/leader.py)
    cluster/watch/state.json, cluster/watch/files what the leading watcher knows (store/mirror.py)
    cluster/watch/requests/<name>.json            what it is asked to do, removed once it is done
    cluster/watch/answers/<name>.json             its answer, kept for some minutes
    cluster/watch/labels/<name>.parquet           labels of a request
    cluster/watch/hosts/<host>/alerts.json        open alerts about a host, from the watcher there
    cluster/watch/hosts/<host>/history/<hour>.json  what its gateway was asked in an hour

A name is <model>.<id> for what concerns one model, and <id> for the rest: so the rules of a store can say who may ask.
On one machine the home has all of it, and nobody is asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pydantic import validate_call

from serin import errors
from serin.errors import SerinError, StoreUnreachable, WatcherSilent
from serin.machine import environment
from serin.machine.typed_json import Document, json2value
from serin.monitoring.alerts.alert import Alert, AlertRecord, Silence
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.alerts.outbox import Outbox
from serin.monitoring.alerts.receivers import Receiver, ReceiverFile, valid_receiver
from serin.monitoring.quality.labels import Columns
from serin.monitoring.quality.store import take_label_file
from serin.pipeline import labels
from serin.pipeline.labels import LabelsAdded
from serin.rollout.run.access import find_cluster
from serin.rollout.run.commands import new_id
from serin.spec.names import valid_model_name
from serin.store.artifacts import Bundle
from serin.store.mirror import fetch
from serin.store.objects import Objects

LEADER: Final = "cluster/watcher.json"
PREFIX: Final = "cluster/watch"
REQUESTS, ANSWERS, HOSTS = (f"{PREFIX}/{name}/" for name in ("requests", "answers", "hosts"))
FOLDERS: Final = ("alerts", "history", "labels", "watch")
_ANSWER_S: Final = 30.0  # a change of the leader takes up to ten seconds
_POLL_S: Final = 0.2
_TYPED: Final = validate_call(config={"strict": True})  # makes a call refuse arguments of other types
_DONE_BY_BOOK: Final = (
    "fire", "resolve", "acknowledge", "silence", "end_silence", "add_receiver", "remove_receiver",
)  # fmt: skip


def watch_home(home: Path, *folders: str) -> Path:
    """The home with what the watcher knows: this one, or an up to date copy of these folders and files of what the
    leading watcher of several hosts knows. Raises StoreUnreachable."""
    objects = find_cluster(home)
    return home if objects is None else fetch(objects, PREFIX, home / "cache" / "cluster-watch", *folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Document, form="serin.watch_request"):
    """`what`: see `obey`."""

    what: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=new_id)

    @property
    def name(self) -> str:
        match self.what:
            case "add_labels":
                model = str(self.arguments["model"])
            case "acknowledge":
                model = str(self.arguments["key"]).partition("/")[0]
            case _:
                return self.id
        return f"{model}.{self.id}"

    @property
    def labels(self) -> str:
        """The object with the labels of this request."""
        return f"{PREFIX}/labels/{self.name}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Document, form="serin.watch_answer"):
    """`refused`: the name of an error, whose fields are in `result`."""

    result: Any = None
    refused: str = ""


class SharedBook:
    """The changes to alerts, receivers and labels that people may ask for, done by the leading watcher. Each call
    returns when the store has its outcome. Raises WatcherSilent when none leads."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def fire(self, alert: Alert, now: float) -> None:
        self._ask("fire", alert=asdict(alert), now=now)

    def resolve(self, key: str, now: float, *, closed: str = "") -> None:
        self._ask("resolve", key=key, now=now, closed=closed)

    def acknowledge(self, key: str, *, by: str, note: str = "", now: float) -> AlertRecord:
        return json2value(AlertRecord, self._ask("acknowledge", key=key, by=by, note=note, now=now))

    def silence(self, **arguments: Any) -> Silence:
        """See `AlertBook.silence`."""
        return json2value(Silence, self._ask("silence", **arguments))

    def end_silence(self, number: int, *, by: str, now: float) -> None:
        self._ask("end_silence", number=number, by=by, now=now)

    def add_receiver(self, name: str, url: str) -> Receiver:
        self._ask("add_receiver", name=name, url=url)
        return valid_receiver(name, url)

    def remove_receiver(self, name: str) -> None:
        self._ask("remove_receiver", name=name)

    def add_labels(self, model: str, content: bytes) -> None:
        request = Request(what="add_labels", arguments={"model": model})
        self._objects.put(request.labels, content)
        self._send(request)

    def _ask(self, what: str, **arguments: Any) -> Any:
        return self._send(Request(what=what, arguments=arguments))

    def _send(self, request: Request) -> Any:
        key, end = f"{REQUESTS}{request.name}.json", time.monotonic() + _ANSWER_S
        self._objects.put(key, request.dump())
        while time.monotonic() < end:
            if stored := self._objects.read(f"{ANSWERS}{request.name}.json"):
                answer = Answer.load(stored.content)
                if answer.refused:
                    raise _refusal(answer)
                return answer.result
            time.sleep(_POLL_S)
        self._objects.remove(key)  # it must not be done later
        raise WatcherSilent(url=self._objects.url)


def _refusal(answer: Answer) -> SerinError:
    """Returns the error that the leading watcher met. Of what the store names, only errors of ours are made."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    kind = kinds.get(answer.refused, object)
    if not issubclass(kind, SerinError):
        raise TypeError(f"{answer.refused} is not an error of Serin's")
    return kind(**answer.result)


class HomeBook(AlertBook):
    """The same on one machine, and what the leading watcher does with its own home."""

    def add_receiver(self, name: str, url: str) -> Receiver:
        return ReceiverFile(self._home).add(name, url)

    def remove_receiver(self, name: str) -> None:
        ReceiverFile(self._home).remove(name)
        Outbox(self._home).cancel(name)


def find_book(home: Path) -> SharedBook | HomeBook:
    """Where alerts, receivers and silences are changed: in this home, or by the leading watcher of several hosts."""
    objects = find_cluster(home)
    return HomeBook(home) if objects is None else SharedBook(objects)


def store_labels(bundle: Bundle, table: pa.Table, columns: Columns) -> LabelsAdded:
    """Stores labels for the answers of a model (pipeline/labels.py). Those of several hosts' are joined by the leading
    watcher."""
    objects = find_cluster(environment.home())
    deliver = None if objects is None else partial(SharedBook(objects).add_labels, bundle.model)
    return labels.add(bundle, table, columns, deliver=deliver)


def obey(request: Request, home: Path, objects: Objects) -> Answer:
    """Does what was asked for in the home of the leading watcher. What was done already is not done again. Raises
    ValueError or TypeError for what this version does not know, or arguments of other types."""
    book, given = HomeBook(home), dict(request.arguments)
    try:
        if request.what == "add_labels":
            model = valid_model_name(str(given["model"]))
            stored = objects.read(request.labels)
            if stored is not None:
                take_label_file(home, model, stored.content)
            return Answer()
        if request.what == "fire":
            given["alert"] = json2value(Alert, given["alert"])
        if request.what not in _DONE_BY_BOOK:
            raise ValueError(f"{request.what!r} is not known to this version")
        found = _TYPED(getattr(book, request.what))(**given)
        return Answer(result=asdict(found) if isinstance(found, AlertRecord | Silence) else None)
    except StoreUnreachable:
        raise
    except SerinError as error:
        return Answer(result=error.fields, refused=type(error).__name__)
