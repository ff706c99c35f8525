"""The journals of models: one object per decision, written before anything acts on it.

    cluster/models/<model>.json                 names a model that has a journal
    rollouts/<model>/decisions/<seq>.json       numbered from 1, each written once with a conditional put

They are in the home of one machine's stack, or in the store that several hosts share. An object names its writer, so
that nobody takes another's decision for its own. Objects never change; compaction removes those that are not needed any
more, and never the newest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from serin.errors import JournalUnknown
from serin.machine.typed_json import checked
from serin.spec.names import is_model_name
from serin.store.numbered import numbered_key, numbers, read_many
from serin.store.objects import FolderObjects, Objects

NOT_PROMISED = (
    "not promised for processes whose own latency level wanders by 5% or more for minutes: "
    "rollout.second_opinion helps, docs/how-to/roll-out.md has the figures"
)
"""Where the promise of `false_rollback` ends, for the report, the console and `serin check`."""

FORMAT: Final = "serin.decision"
VERSION: Final = 1
MODELS: Final = "cluster/models/"

_CHUNK: Final = 16

Keep = Callable[[Sequence["Decision"]], Collection[int]]  # the numbers of the decisions that still matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`evidence` is what was seen, `state` what a controller needs to resume exactly; both JSON objects."""

    t: float  # seconds
    rollout: str
    phase: str
    step: int | None  # index of the step while traffic is shifted
    weight: float  # percent of traffic the candidate has from now on
    verdict: str | None
    reason: str
    by: str
    evidence: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    command: str | None = None  # the command that was obeyed by this decision
    seq: int = 0  # counts the decisions from 1, also those that compaction has left out; given by append

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """The decision that a JSON object holds; keys of later versions are left out. TypeError: it holds none."""
        return cls(**{part.name: row[part.name] for part in fields(cls) if part.name in row})


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A controller in one term of its leadership."""

    holder: str
    term: int


def prefix_of(model: str) -> str:
    return f"rollouts/{model}/decisions/"


def dump_decision(decision: Decision, writer: Writer) -> bytes:
    value = {"format": FORMAT, "version": VERSION, "writer": asdict(writer), "decision": asdict(decision)}
    return json.dumps(value, separators=(",", ":")).encode()


def load_decision(key: str, content: bytes) -> Decision:
    """Raises JournalUnknown for anything else."""
    try:
        return Decision.of_row(checked(json.loads(content), FORMAT, VERSION)["decision"])
    except (ValueError, TypeError, KeyError) as error:
        raise JournalUnknown(path=key, found=content[:80].decode(errors="replace")) from error


def journaled_models(objects: Objects) -> list[str]:
    """Returns the models that have a journal, sorted. In a folder, whatever has the name of one: it may be damaged."""
    if isinstance(objects, FolderObjects):
        names = objects.names(MODELS)
    else:
        names = [key.removeprefix(MODELS) for key in objects.keys(MODELS)]
    models = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return [model for model in models if is_model_name(model)]


def add_model(objects: Objects, model: str) -> None:
    objects.put(f"{MODELS}{model}.json", b"{}")


class DecisionCache:
    """Decisions as they were read. They never change, so each is read once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[str, dict[int, Decision]] = {}

    def all(self, model: str) -> list[Decision]:
        """Returns every decision about a model, oldest first."""
        listed = numbers(self._objects, prefix_of(model))
        self._read(model, [seq for seq in listed if seq not in self._of(model)])
        self._forget(model, listed)
        return [decision for seq in listed if (decision := self._of(model).get(seq))]

    def last(self, model: str) -> Decision | None:
        """Returns the newest decision about a model."""
        while listed := numbers(self._objects, prefix_of(model)):
            self._read(model, [seq for seq in listed[-1:] if seq not in self._of(model)])
            if found := self._of(model).get(listed[-1]):
                return found
        return None

    def of_rollout(self, model: str, rollout: str) -> list[Decision]:
        """Returns one rollout's decisions, oldest first, without reading those before it."""
        listed = numbers(self._objects, prefix_of(model))
        self._forget(model, listed)
        found: list[Decision] = []
        for end in range(len(listed), 0, -_CHUNK):
            chunk = listed[max(end - _CHUNK, 0) : end]
            self._read(model, [seq for seq in chunk if seq not in self._of(model)])
            decisions = [decision for seq in chunk if (decision := self._of(model).get(seq))]
            found = [each for each in decisions if each.rollout == rollout] + found
            if found and decisions and decisions[0].rollout != rollout:
                break  # the decisions of a rollout are neighbours
        return found

    def put(self, model: str, decision: Decision) -> None:
        """Adds a decision that this process has written."""
        self._of(model)[decision.seq] = decision

    def _of(self, model: str) -> dict[int, Decision]:
        return self._known.setdefault(model, {})

    def _forget(self, model: str, listed: Sequence[int]) -> None:
        """Drops what compaction has removed."""
        there = set(listed)
        for seq in [seq for seq in self._of(model) if seq not in there]:
            del self._of(model)[seq]

    def _read(self, model: str, wanted: Sequence[int]) -> None:
        keys = [numbered_key(prefix_of(model), seq) for seq in wanted]
        for seq, key, stored in zip(wanted, keys, read_many(self._objects, keys), strict=True):
            if stored is not None:  # else compaction was faster
                self._of(model)[seq] = load_decision(f"{self._objects.url}/{key}", stored.content)
