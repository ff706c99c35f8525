"""How far the following of a model's labels has come, and what was counted on the way: state.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from serin.machine.documents import read_json
from serin.machine.durable import write_whole
from serin.machine.private import make_private
from serin.machine.typed_json import Document

if TYPE_CHECKING:
    from serin.monitoring.quality.scan import Found

FILE = "state.json"

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class QualityState(Document, form="serin.quality-state"):
    """`part` and `labels`: the last record and file of labels that were taken in. `recorded`: rows by version and day
    (UTC). `scores`: for the estimate, counts of scores by version and day: {place: count}. `evidence`: by version.
    `forgotten`: the last deletion on request that the counts take into account. `source`: identifies the records whose
    parts are counted."""

    part: str | None = None
    source: int = 0
    labels: str = ""
    received: int = 0
    ambiguous: int = 0
    unclear: int = 0
    beyond: int = 0
    forgotten: str | None = None
    recorded: dict[str, dict[str, int]] = field(default_factory=dict)
    scores: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count(self, found: Found) -> None:
        """Counts labels that cannot be used."""
        self.ambiguous += len(found.ambiguous)
        self.unclear += len(found.unclear)
        self.beyond += len(found.beyond)

    def count_again(self, forgotten: str | None) -> None:
        """Takes in all records again, after some were deleted. Labels that were joined stay so: each is evidence
        once."""
        self.part, self.recorded, self.scores, self.forgotten = None, {}, {}, forgotten

    def forget_before(self, moment: float) -> None:
        """Drops the counts of days that ended before this time."""
        first = day_of(moment)
        self.recorded = {version: _from(days, first) for version, days in self.recorded.items()}
        self.scores = {version: _from(days, first) for version, days in self.scores.items()}


def day_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _from(days: dict[str, T], first: str) -> dict[str, T]:
    return {day: each for day, each in days.items() if day >= first}


def read_state(folder: Path) -> QualityState:
    """The state; that of a new model when there is none. Raises FileBroken when it cannot be read."""
    advice = "restore it, or move it away: the quality of this model is then measured again from its records"
    return read_json(folder / FILE, QualityState.from_json, advice=advice) or QualityState()


def write_state(folder: Path, state: QualityState) -> None:
    make_private(folder.parent.parent)
    make_private(folder.parent)
    make_private(folder)
    write_whole(folder / FILE, state.dump())
