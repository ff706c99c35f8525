"""The live quality of a model as it is shown: watch/quality/<model>.json, for people, the console and Prometheus."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serin.formats.quality import Metrics
from serin.machine.durable import make_private, write_whole
from serin.machine.typed_json import Document
from serin.spec.names import valid_model_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A metric that the scores let expect. `value`: over all recorded rows; `labelled`: over the rows with a label, to
    be compared with what was measured there; `error`: the difference. Both None without labels."""

    value: float
    labelled: float | None = None
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentQuality:
    """The rows that share a value, such as `carrier=AA`. `offline`: on the test rows."""

    name: str
    rows: int
    metrics: Metrics
    offline: Metrics = field(default_factory=dict)
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DayQuality:
    """The requests of a day (UTC): how many rows were recorded and labelled, and the mean loss of the latter."""

    day: str
    recorded: int
    labelled: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The quality objective of a release: whether its mean loss is at most `limit` (the test rows' plus the margin).
    `evidence`: against that; an alarm is raised at `threshold`. `used`: labels so far. `blocks`: how many periods of
    `block_s` were judged; `judged`: when the next one is at the earliest. `since`: when the excess began, of an alarm.
    """

    loss_name: str
    offline: float
    limit: float
    mean: float | None
    evidence: float
    threshold: float
    blocks: int
    used: int
    alarm: bool = False
    since: float | None = None
    block_s: float | None = None
    judged: float | None = None

    @property
    def block(self) -> str:
        """The period in a word, such as "day"; empty when it is not known."""
        return {60: "minute", 3600: "hour", 86_400: "day", 604_800: "week"}.get(int(self.block_s or 0), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseQuality:
    """One version. `delay_s`: median and 90% quantile of the time from request to label. `measured_on`: the newest
    labelled rows, which the metrics are of. `reliability`: mean score, rate and rows of bins of these."""

    version: int
    release: str
    task: str
    recorded: int
    labelled: int
    coverage: float | None
    delay_s: tuple[float, float] | None
    measured_on: int
    loss_name: str
    metrics: Metrics = field(default_factory=dict)
    offline: Metrics = field(default_factory=dict)
    estimate: Mapping[str, Estimated] = field(default_factory=dict)
    reliability: tuple[tuple[float, float, int], ...] = ()
    segments: tuple[SegmentQuality, ...] = ()
    days: tuple[DayQuality, ...] = ()
    objective: Objective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityView(Document, form="serin.live-quality"):
    """`received`: labels so far; `unknown`: about requests that are not recorded; `ambiguous`: by a client's id that
    several requests have; `unclear`: without a row number for a request of several rows; `beyond`: with a row that
    the request does not have. `behind`: more labels or records are waiting to be taken in. Bands are of 95%."""

    model: str
    updated: float
    received: int
    unknown: int
    ambiguous: int
    unclear: int
    behind: bool
    beyond: int = 0
    releases: tuple[ReleaseQuality, ...] = ()


def read_quality(home: Path, model: str) -> QualityView | None:
    """The live quality of a model; None when nothing is known, or the file is of another version of Serin."""
    return QualityView.load_file(quality_file(home, model))


def write_quality(home: Path, view: QualityView) -> None:
    path = quality_file(home, view.model)
    make_private(path.parent)
    write_whole(path, json.dumps(view.to_json(), allow_nan=False))


def quality_file(home: Path, model: str) -> Path:
    """Returns the file that the watcher writes again every few seconds."""
    return home / "watch" / "quality" / f"{valid_model_name(model)}.json"
