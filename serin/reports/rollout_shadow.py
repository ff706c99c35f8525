"""The part of a rollout's page about recorded requests that a candidate answered before it had traffic. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

_NOTE = (
    "Recorded requests of the live version were sent to the candidate; no client saw an answer. A difference is the "
    "candidate's score minus the live version's on the same row. It is not a fault by itself: a version that has "
    "learned something new differs."
)
_HEAD = (
    "segment",
    "rows",
    "live mean score",
    "mean difference",
    "mean absolute difference",
    "of the mean score",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSegment:
    """The scores of some rows. `relative`: the mean absolute difference as a share of the live version's mean."""

    name: str
    rows: int
    live: float
    difference: float
    absolute: float
    relative: float
    beyond: bool = False  # more than the plan allows

    @property
    def share(self) -> str:
        """The relative difference as text. A score that is not a number differs without limit."""
        return f"{self.relative:.1%}" if math.isfinite(self.relative) else "not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStory:
    """`compared`: rows that the candidate's own bundle computed as well. `mismatch`: the row that was served otherwise,
    with its `values`; empty: none."""

    verdict: str
    rows: int
    needed: int
    compared: int
    unsteady: int
    requests: int
    failed: int
    latency: str
    max_difference: float | None
    segments: tuple[ShadowSegment, ...]
    mismatch: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[str, ...]:
        """What was found, in plain sentences."""
        rows = f"{self.rows} of {self.needed}" if self.rows < self.needed else str(self.rows)
        enough = "" if self.rows < self.needed else f"; at least {self.needed} were needed"
        found = [f"{rows} recorded rows were answered in {self.requests} requests{enough}."]
        if self.mismatch:
            found.append(f"The candidate does not serve what its bundle computes: {self.mismatch}.")
        elif self.compared:
            again = f", {self.unsteady} of them only when they were asked again" if self.unsteady else ""
            found.append(
                f"All {self.compared} served scores are what the candidate's own bundle computes{again}."
            )
        elif self.rows:
            found.append(
                "The candidate has no graph to compute the scores with, so they were not compared with one."
            )
        found.append(f"{self.failed} requests failed; {self.latency}.")
        if self.max_difference is not None:
            far = [segment.name for segment in self.segments if segment.beyond]
            what = f"beyond it: {', '.join(far)}" if far else "no segment is beyond it"
            found.append(
                f"The scores may differ from the live version's by {self.max_difference:.2g} of its mean score; {what}."
            )
        return tuple(found)


def shadow_section(story: ShadowStory) -> str:
    """Returns the section as HTML."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in story.lines)
    return (
        f"<h2>Recorded requests before the first traffic</h2>{lines}{_values(story)}{_segments(story)}"
        f'<p class="note">{_NOTE}</p>'
    )


def _values(story: ShadowStory) -> str:
    if not story.values:
        return ""
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in story.values.items()
    )
    return f"<table><tr><th>column of that row</th><th>value</th></tr>{cells}</table>"


def _segments(story: ShadowStory) -> str:
    if not story.segments:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    rows = "".join(
        f'<tr><td>{escape(segment.name)}</td><td class="n">{segment.rows}</td><td class="n">{segment.live:.4g}</td>'
        f'<td class="n">{segment.difference:+.3g}</td><td class="n">{segment.absolute:.3g}</td>'
        f'<td class="n{" bad" if segment.beyond else ""}">{segment.share}</td></tr>'
        for segment in story.segments
    )
    return f"<table><tr>{head}</tr>{rows}</table>"
