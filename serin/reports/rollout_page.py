"""Renders a rollout as one HTML page: outcome, evidence, latencies, decisions and recorded requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Final

import numpy as np

from serin.evidence.e_process import Array
from serin.evidence.histogram import bands_us, latency_name, quantiles_us, upper_us
from serin.formats.serving.journal import NOT_PROMISED, Decision
from serin.reports.charts import SERIES, Axes, Drawing, Scale
from serin.reports.page import html_page, table

_WIDTH, _HEIGHT = 920.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 770.0, 16.0, 266.0
_LEGEND: Final = _RIGHT + 6
_EVIDENCE: Final = (1e-2, 1e5)  # values outside are drawn at the edge
_STEPS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
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
_DECISION = ("UTC", "phase", "traffic", "verdict", "reason", "by")
_AGAINST_NOTE: Final = (
    "Each line is the wealth of a bet against the candidate: it starts at 1 and shrinks while the candidate does well. "
    "The shaded bands show the candidate's share of traffic."
)
_FOR_NOTE: Final = (
    "The wealth of bets that the candidate is not slower. Each must reach the threshold before the candidate gets all "
    "traffic."
)
_LATENCY_NOTE: Final = (
    "All requests that were judged. The bars are 95% intervals of each quantile for independent requests. They are an "
    "illustration: no decision depends on them."
)
_ENDS: Final = {
    "promoted": ("good", "promoted"),
    "rolled_back": ("bad", "rolled back"),
    "retired": ("", "retired"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePoint:
    """The evidence at one time.

    `e_values`: the evidence of each guard against the candidate; `total`: of all guards together; `proofs`: the
    evidence that the candidate is not slower.
    """

    t: float
    weight_percent: float
    total: float
    e_values: Mapping[str, float]
    proofs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryRules:
    """The settings of the rollout that its page mentions. `steps`: percent of traffic."""

    steps: tuple[float, ...]
    shadow: bool  # recorded requests come before the steps
    quantiles: tuple[float, ...]
    rollback_at: float
    promote_at: float
    false_rollback: float
    allowed: str  # how much slower a candidate may be
    warmup_s: float
    not_promised: str = NOT_PROMISED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStory:
    """One rollout as its page shows it. Times are seconds since the epoch."""

    candidate: str
    stable: str
    control: str  # what the candidate was compared with
    phase: str
    hold: str | None
    began_because: str  # why it was begun, or by whom
    reason: str  # of the decision that determined the outcome
    rules: StoryRules
    began: float
    ended: float | None
    decisions: tuple[Decision, ...]  # those that changed something
    points: tuple[EvidencePoint, ...]
    latencies: tuple[Array, Array] | None  # bin counts: stable's, candidate's
    shadow: ShadowStory | None = None  # recorded requests came before the first step


def evidence_drawing(story: RolloutStory) -> Drawing | None:
    """Draws the guards' evidence over time, the threshold for a rollback, and the weights behind it."""
    points = story.points
    if not points:
        return None
    guards = {name: [point.e_values.get(name, 1.0) for point in points] for name in points[-1].e_values}
    limit = (story.rules.rollback_at, f"rollback at {story.rules.rollback_at:g}", "alarm")
    return _over_time(points, guards, limit, total=[point.total for point in points])


def proof_drawing(story: RolloutStory) -> Drawing | None:
    """Draws the evidence that the candidate is not slower, and the threshold for all traffic."""
    points = story.points
    if not points or not points[-1].proofs:
        return None
    proofs = {name: [point.proofs.get(name, 1.0) for point in points] for name in points[-1].proofs}
    limit = (story.rules.promote_at, f"enough at {story.rules.promote_at:g}", "good")
    return _over_time(points, proofs, limit)


def _over_time(
    points: Sequence[EvidencePoint],
    series: Mapping[str, Sequence[float]],
    limit: tuple[float, str, str],
    *,
    total: Sequence[float] | None = None,
) -> Drawing:
    drawing, times = Drawing(_WIDTH, _HEIGHT, font=11), [point.t - points[0].t for point in points]
    end = max(times[-1], 1.0)
    axes = Axes(drawing, Scale(0.0, end, _LEFT, _RIGHT), Scale(*_EVIDENCE, _BOTTOM, _TOP, log=True))
    _weights(axes, points, times)
    axes.rows(axes.y.ticks(), lambda value: f"{value:g}")
    step = next((nice for nice in _STEPS_S if end / nice <= 10), _STEPS_S[-1])
    axes.columns(
        range(0, int(end) + 1, step), lambda s: f"{s:g} s" if end <= 300 else f"{s / 60:g} min", lines=False
    )
    place, words, colour = axes.limit(limit[0], limit[2]), limit[1], limit[2]
    drawing.text(_LEGEND, place + 4, words, colour=colour)
    for index, (name, e_values) in enumerate(series.items()):
        colour = SERIES[index % len(SERIES)]
        axes.line(list(zip(times, e_values, strict=True)), colour, width=1.1 if total else 1.8)
        drawing.text(_LEGEND, _BOTTOM - 16.0 * (len(series) - index), name, colour=colour)
    if total:
        axes.line(list(zip(times, total, strict=True)), "ink", width=2.6)
        drawing.text(_LEGEND, _TOP + 8, "all together", colour="ink", bold=True)
    return drawing


def _weights(axes: Axes, points: Sequence[EvidencePoint], times: Sequence[float]) -> None:
    """Draws a band for each weight of the candidate."""
    for begin, end, weight in _stretches(points, times):
        axes.bar((begin, end), _EVIDENCE, "orange", gap=0, opacity=0.04 + 0.10 * weight / 100)
        if axes.x(end) - axes.x(begin) > 24:
            axes.drawing.text(axes.x(begin) + 4, _TOP + 12, f"{weight:g}%", colour="orange")


def _stretches(
    points: Sequence[EvidencePoint], times: Sequence[float]
) -> Iterator[tuple[float, float, float]]:
    """Returns (begin, end, weight) of each interval with a constant weight."""
    begin, weight = times[0], points[0].weight_percent
    for t, point in zip(times, points, strict=True):
        if point.weight_percent != weight:
            yield begin, t, weight
            begin, weight = t, point.weight_percent
    yield begin, times[-1], weight


def latency_drawing(story: RolloutStory) -> Drawing | None:
    """Draws the distribution of latencies in both arms, with their quantiles."""
    if story.latencies is None or not all(counts.sum() for counts in story.latencies):
        return None
    seen = np.flatnonzero(sum(story.latencies, np.zeros(1)))
    bins = range(max(int(seen[0]) - 2, 0), min(int(seen[-1]) + 3, len(story.latencies[0])))
    drawing, shares = Drawing(_WIDTH, _HEIGHT, font=11), [_smooth(counts) for counts in story.latencies]
    axes = Axes(
        drawing,
        Scale(float(upper_us(bins[0])) / 1000, float(upper_us(bins[-1])) / 1000, _LEFT, _RIGHT, log=True),
        Scale(0.0, max(float(share.max()) for share in shares), _BOTTOM, _TOP + 24),
    )
    axes.columns(axes.x.ticks(12), lambda ms: f"{ms:g} ms")
    for index, (name, colour) in enumerate(((story.stable, "blue"), (story.candidate, "orange"))):
        row = [(float(upper_us(place)) / 1000, float(shares[index][place])) for place in bins]
        axes.area(row, colour)
        axes.line(row, colour, width=1.8)
        drawing.text(_LEGEND, _TOP + 10 + 16 * index, name, colour=colour, bold=True)
        _quantiles(axes, story.latencies[index], story.rules.quantiles, colour, index)
    return drawing


def _quantiles(axes: Axes, counts: Array, quantiles: Sequence[float], colour: str, arm: int) -> None:
    found, bands = quantiles_us(counts, quantiles), bands_us(counts, quantiles)
    for number, (quantile, us, (low, high)) in enumerate(zip(quantiles, found, bands, strict=True)):
        if us is None:
            continue
        left, right, place = axes.x(low / 1000), axes.x(high / 1000), axes.x(us / 1000)
        top = _BOTTOM - 8.0 * (2 * number + arm + 1)
        axes.drawing.rect(left, top, right - left, 5, colour, opacity=0.45)
        axes.drawing.line([(place, _BOTTOM), (place, _TOP + 20)], colour, width=1, dashes="2 3")
        label = f"{latency_name(quantile)} {us / 1000:.3g} ms"
        axes.drawing.text(_LEGEND, _TOP + 58 + 16 * (2 * number + arm), label, colour=colour)


def _smooth(counts: Array) -> Array:
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / 1.5) ** 2)
    smooth: Array = np.convolve(counts / counts.sum(), kernel / kernel.sum(), mode="same")
    return smooth


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
    rows = (f"<td>{escape(name)}</td><td>{escape(value)}</td>" for name, value in story.values.items())
    return table(("column of that row", "value"), rows)


def _segments(story: ShadowStory) -> str:
    if not story.segments:
        return ""
    rows = (
        f'<td>{escape(segment.name)}</td><td class="n">{segment.rows}</td><td class="n">{segment.live:.4g}</td>'
        f'<td class="n">{segment.difference:+.3g}</td><td class="n">{segment.absolute:.3g}</td>'
        f'<td class="n{" bad" if segment.beyond else ""}">{segment.share}</td>'
        for segment in story.segments
    )
    return table(_HEAD, rows)


def story2html(story: RolloutStory) -> str:
    held = f", held ({story.hold})" if story.hold else ""
    kind, word = _ENDS.get(story.phase, ("", f"{story.phase}{held}"))
    return html_page(
        f"{story.candidate} against {story.stable}",
        f'<p class="lead"><span class="{kind}">{escape(word)}</span>: {escape(story.reason)}</p>{_rules(story)}'
        + (shadow_section(story.shadow) if story.shadow else "")
        + _chart("Evidence against the candidate", evidence_drawing(story), _AGAINST_NOTE)
        + _chart("Evidence for the candidate", proof_drawing(story), _FOR_NOTE)
        + _chart("Latency of both arms", latency_drawing(story), _LATENCY_NOTE)
        + f"<h2>Decisions</h2>{table(_DECISION, map(_row, story.decisions))}",
    )


def _rules(story: RolloutStory) -> str:
    rules = story.rules
    steps = ", ".join([*(["shadow"] if rules.shadow else []), *(f"{step:g}%" for step in rules.steps)])
    return (
        f"<p>{escape(_sentence(story.began_because))}</p>"
        f'<p class="note">{_time(story.began)} to {_time(story.ended) if story.ended else "now"} UTC. Steps: {steps}. '
        f"A candidate within the allowed limits is rolled back with a probability of at most {rules.false_rollback:g} "
        f"({NOT_PROMISED}). "
        f"Allowed: slower by {escape(rules.allowed)}; latencies of the first {rules.warmup_s:g} s with traffic are not "
        f"compared. Compared with: {escape(story.control)}.</p>"
    )


def _chart(title: str, drawing: Drawing | None, note: str) -> str:
    shown = drawing.embedded(title) if drawing else "<p>Nothing was measured.</p>"
    return f'<h2>{escape(title)}</h2><section>{shown}<p class="note">{escape(note)}</p></section>'


def _row(decision: Decision) -> str:
    hold = decision.state.get("hold")
    cells = (
        _time(decision.t)[11:],
        f"{decision.phase}, held: {hold}" if hold else decision.phase,
        f"{decision.weight:g}%",
        decision.verdict or "",
        decision.reason,
        decision.by,
    )
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _time(t: float) -> str:
    return f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S}"
