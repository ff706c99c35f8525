"""A column after its alarm: silent until the bins that alarmed have been back within tolerance. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serin.evidence.e_detector import Array

if TYPE_CHECKING:
    from serin.monitoring.drift.alarm import Alarm
    from serin.monitoring.drift.detector import DriftDetector

_BLOCKS = {
    10.0: 24,
    60.0: 10,
    3600.0: 6,
    86_400.0: 3,
    604_800.0: 1,
}  # over which a share must be within tolerance


@dataclass(slots=True, kw_only=True)
class QuietBin:
    """A bin that alarmed, by its place among all bins, and its counts in the blocks since it was last looked at."""

    place: int
    blocks: int = 0
    hits: float = 0.0
    rows: float = 0.0
    back: bool = False


@dataclass(slots=True, kw_only=True)
class QuietColumn:
    """`since`: when the alarm's shift began."""

    since: float
    bins: list[QuietBin]

    @classmethod
    def after(cls, alarm: Alarm, detector: DriftDetector) -> QuietColumn:
        first = int(detector.first_bin[alarm.series])
        return cls(since=alarm.since, bins=[QuietBin(place=first + shift.bin) for shift in alarm.bins])

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> QuietColumn:
        return cls(since=document["since"], bins=[QuietBin(**entry) for entry in document["bins"]])

    def add_blocks(self, detector: DriftDetector, due: Array) -> bool:
        """Adds the blocks that have just ended, and says whether the column is back."""
        hits = detector.hits()
        for each in self.bins:
            group = int(detector.group_of_bin[each.place])
            if not due[group]:
                continue
            each.blocks += 1
            each.hits += float(hits[each.place])
            each.rows += float(detector.open_rows[group])
            if each.blocks >= _BLOCKS[float(detector.group_length[group])]:
                low, high = detector.within[:, each.place]
                each.back = bool(low <= each.hits / each.rows <= high)
                each.blocks, each.hits, each.rows = 0, 0.0, 0.0
        return all(each.back for each in self.bins)
