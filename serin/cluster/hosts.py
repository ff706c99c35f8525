"""What the hosts report, and for how long each has been silent by this process's clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from serin.formats.cluster.host_report import PREFIX, AgentReport
from serin.machine.typed_json import Document
from serin.store.numbered import read_many
from serin.store.objects import Objects

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Document)

SILENT_S: Final = 5.0
LOST_S: Final = 30.0  # a host that is silent for so long has no releases: others take its place

_GAP_S: Final = 2.0  # reports that were not looked at for longer say nothing about their hosts' silence


def load_foreign(kind: type[T], content: bytes, name: str) -> T | None:
    """Return the document that another host wrote; None, with a warning, for one that this version of Serin cannot
    read."""
    try:
        return kind.load(content)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read by this version of Serin: %s", name, error)
        return None


class Hosts:
    """The reports of all agents that nobody has forgotten. Replaced as a whole, so that any thread may read them."""

    def __init__(self, objects: Objects, steady: Callable[[], float]) -> None:
        self._objects, self._steady = objects, steady
        self._beats: dict[str, tuple[int, float]] = {}  # by host: beat, and since when it is that
        self._looked_at: float | None = None
        self._missing: set[str] = set()  # hosts whose report was missing at the last look
        self.reports: Mapping[str, AgentReport] = {}

    def refresh(self) -> None:
        """Reads every report. A host is forgotten when its report is missing twice in a row: a report that is being
        replaced may be missing once. Raises StoreUnreachable."""
        keys = [key for key in self._objects.keys(PREFIX) if key.endswith("/agent.json")]
        reports: dict[str, AgentReport] = {}
        for key, stored in zip(keys, read_many(self._objects, keys), strict=True):
            report = load_foreign(AgentReport, stored.content, key) if stored else None
            if report is not None:
                reports[key.removeprefix(PREFIX).partition("/")[0]] = report
        missing = self.reports.keys() - reports.keys()
        for host in missing - self._missing:
            reports[host] = self.reports[host]
        self._missing = missing - self._missing
        self._count_beats(reports)
        self.reports = reports

    def _count_beats(self, reports: Mapping[str, AgentReport]) -> None:
        t = self._steady()
        gap = 0.0 if self._looked_at is None else t - self._looked_at
        excused = gap if gap > _GAP_S else 0.0
        beats = {}
        for host, report in reports.items():
            beat, since = self._beats.get(host, (None, t))
            beats[host] = (report.beat, t if beat != report.beat else min(since + excused, t))
        self._beats, self._looked_at = beats, t

    def silent_s(self, host: str) -> float:
        """Returns for how long a host has been silent; 0.0 while it reports."""
        t = self._steady() if self._looked_at is None else self._looked_at
        _, since = self._beats.get(host, (0, t))
        return t - since if t - since >= SILENT_S else 0.0

    @property
    def reporting(self) -> list[str]:
        """The hosts that are not silent, sorted."""
        return sorted(host for host in self.reports if not self.silent_s(host))

    @property
    def silent(self) -> dict[str, float]:
        """The silent hosts, and for how long they are."""
        return {host: seconds for host in sorted(self.reports) if (seconds := self.silent_s(host))}

    @property
    def lost(self) -> frozenset[str]:
        """The hosts that have been silent for too long to be counted on."""
        return frozenset(host for host, seconds in self.silent.items() if seconds >= LOST_S)
