"""The charts of a rollout's page and their data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from serin.evidence.e_process import Array
from serin.evidence.histogram import bands_us, latency_name, quantiles_us, upper_us
from serin.formats.serving.journal import NOT_PROMISED, Decision
from serin.reports.rollout_shadow import ShadowStory
from serin.reports.svg import SERIES, Axes, Drawing, Scale

_WIDTH, _HEIGHT = 920.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 770.0, 16.0, 266.0
_LEGEND: Final = _RIGHT + 6
_EVIDENCE: Final = (1e-2, 1e5)  # values outside are drawn at the edge
_STEPS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)


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
