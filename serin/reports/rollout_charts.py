"""The two drawings of a rollout's page, as SVG that needs nothing beside itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from serin.evidence.e_process import Array
from serin.evidence.histogram import bands_us, latency_name, quantiles_us, upper_us
from serin.formats.serving.journal import Decision

STABLE, CANDIDATE, ALARM, INK, FAINT = "#1f5fa8", "#d9731a", "#b3261e", "#22272e", "#d8dde3"
GOOD: Final = "#2a8c6a"
_GUARDS: Final = ("#2a8c6a", "#8a4fa3", "#5b7c99", "#8c7a1f", "#b0413e", "#7a7a7a", "#3d8fb0", "#a35f8a")
_WIDTH, _HEIGHT = 920.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 150.0, 16.0, 34.0
_LOW, _HIGH = 1e-2, 1e5  # evidence outside is drawn at the edge

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePoint:
    """What was known at a time. `e_values`: the evidence of each guard against the candidate; `total`: of all guards
    together; `proofs`: the evidence that the candidate is not slower."""

    t: float
    weight_percent: float
    total: float
    e_values: Mapping[str, float]
    proofs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryRules:
    """The settings of the rollout that its page mentions. `steps`: percent of traffic."""

    steps: tuple[float, ...]
    quantiles: tuple[float, ...]
    rollback_at: float
    promote_at: float
    false_rollback: float
    allowed: str  # how much slower a candidate may be
    warmup_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStory:
    """One rollout as its page shows it. Times are seconds since the epoch."""

    candidate: str
    stable: str
    control: str  # what the candidate was compared with
    phase: str
    hold: str | None
    reason: str  # of the decision that settled the outcome
    rules: StoryRules
    began: float
    ended: float | None
    decisions: tuple[Decision, ...]  # those that changed something
    points: tuple[EvidencePoint, ...]
    latencies: tuple[Array, Array] | None  # bin counts: stable's, candidate's


def evidence_drawing(story: RolloutStory) -> str:
    """The guards' evidence over time against what sends a candidate back; the weights behind it."""
    points = story.points
    if not points:
        return ""
    guards = {name: [point.e_values.get(name, 1.0) for point in points] for name in points[-1].e_values}
    total = [point.total for point in points]
    limit = (story.rules.rollback_at, f"back at {story.rules.rollback_at:g}", ALARM)
    return _over_time(points, guards, limit, "evidence against the candidate over time", total=total)


def proof_drawing(story: RolloutStory) -> str:
    """The evidence that the candidate is not slower, against what it needs to get all traffic."""
    points = story.points
    if not points or not points[-1].proofs:
        return ""
    proofs = {name: [point.proofs.get(name, 1.0) for point in points] for name in points[-1].proofs}
    limit = (story.rules.promote_at, f"enough at {story.rules.promote_at:g}", GOOD)
    return _over_time(points, proofs, limit, "evidence for the candidate over time")


def _over_time(
    points: Sequence[EvidencePoint],
    series: Mapping[str, Sequence[float]],
    limit: tuple[float, str, str],
    label: str,
    *,
    total: Sequence[float] | None = None,
) -> str:
    start, end = points[0].t, max(points[-1].t, points[0].t + 1.0)
    x, y = _linear(start, end, _LEFT, _WIDTH - _RIGHT), _logarithmic(_LOW, _HIGH, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_weights(points, x), *_decades(y), *_seconds(start, end, x)]
    enough, words, colour = y(limit[0]), *limit[1:]
    parts.append(_line([(_LEFT, enough), (_WIDTH - _RIGHT, enough)], colour, 1.4, dashes="6 4"))
    parts.append(_text(_WIDTH - _RIGHT + 6, enough + 4, words, colour))
    legend = _HEIGHT - _BOTTOM - 16.0 * len(series)
    for index, (name, worths) in enumerate(series.items()):
        colour = _GUARDS[index % len(_GUARDS)]
        row = [(x(point.t), y(worth)) for point, worth in zip(points, worths, strict=True)]
        parts.append(_line(row, colour, 1.1 if total else 1.8))
        parts.append(_text(_WIDTH - _RIGHT + 6, legend + 16.0 * index, name, colour))
    if total:
        row = [(x(point.t), y(worth)) for point, worth in zip(points, total, strict=True)]
        parts.append(_line(row, INK, 2.6))
        parts.append(_text(_WIDTH - _RIGHT + 6, _TOP + 8, "all together", INK, bold=True))
    return _svg(parts, label)


def latency_drawing(story: RolloutStory) -> str:
    """How latencies are spread in both arms, with their quantiles."""
    if story.latencies is None or not all(counts.sum() for counts in story.latencies):
        return ""
    both = sum(story.latencies, np.zeros(1))
    held = np.flatnonzero(both)
    low, high = float(upper_us(int(held[0]) - 2)), float(upper_us(int(held[-1]) + 2))
    x = _logarithmic(low, high, _LEFT, _WIDTH - _RIGHT)
    shares = [_smooth(counts / counts.sum()) for counts in story.latencies]
    y = _linear(0.0, max(float(share.max()) for share in shares), _HEIGHT - _BOTTOM, _TOP + 24)
    parts = list(_milliseconds(low, high, x))
    names = (story.stable, story.candidate)
    for index, (share, colour) in enumerate(zip(shares, (STABLE, CANDIDATE), strict=True)):
        bins = range(max(int(held[0]) - 2, 0), min(int(held[-1]) + 3, len(share)))
        row = [(x(float(upper_us(place))), y(float(share[place]))) for place in bins]
        parts.append(_area(row, colour))
        parts.append(_line(row, colour, 1.8))
        parts.append(_text(_WIDTH - _RIGHT + 6, _TOP + 10 + 16 * index, names[index], colour, bold=True))
        parts += _quantiles(story.latencies[index], story.rules.quantiles, x, colour, index)
    return _svg(parts, "latency of both arms")


def _quantiles(counts: Array, quantiles: Sequence[float], x: Scale, colour: str, index: int) -> Iterator[str]:
    bands = bands_us(counts, quantiles)
    for number, (quantile, us) in enumerate(zip(quantiles, quantiles_us(counts, quantiles), strict=True)):
        if us is None:
            continue
        left, right = (min(max(x(end or 1e-9), _LEFT), _WIDTH - _RIGHT) for end in bands[number])
        top = _HEIGHT - _BOTTOM - 8.0 * (2 * number + index + 1)
        box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="5"'
        yield f'<rect {box} fill="{colour}" fill-opacity="0.45"/>'
        yield _line([(x(us), _HEIGHT - _BOTTOM), (x(us), _TOP + 20)], colour, 1.0, dashes="2 3")
        label = f"{latency_name(quantile)} {us / 1000:.3g} ms"
        yield _text(_WIDTH - _RIGHT + 6, _TOP + 58 + 16 * (2 * number + index), label, colour)


def _smooth(share: Array) -> Array:
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / 1.5) ** 2)
    smooth: Array = np.convolve(share, kernel / kernel.sum(), mode="same")
    return smooth


def _weights(points: Sequence[EvidencePoint], x: Scale) -> Iterator[str]:
    """A band for each weight the candidate had."""
    begin = points[0]
    for after in (*points[1:], None):
        if after is not None and after.weight_percent == begin.weight_percent:
            continue
        left, right = x(begin.t), x(after.t if after else points[-1].t)
        shade = 0.04 + 0.10 * begin.weight_percent / 100
        box = f'x="{left:.1f}" y="{_TOP}" width="{max(right - left, 1):.1f}" height="{_HEIGHT - _TOP - _BOTTOM}"'
        yield f'<rect {box} fill="{CANDIDATE}" fill-opacity="{shade:.3f}"/>'
        if right - left > 24:
            yield _text(left + 4, _TOP + 12, f"{begin.weight_percent:g}%", CANDIDATE)
        if after is not None:
            begin = after


def _decades(y: Scale) -> Iterator[str]:
    for power in range(round(math.log10(_LOW)), round(math.log10(_HIGH)) + 1):
        height = y(10.0**power)
        yield _line([(_LEFT, height), (_WIDTH - _RIGHT, height)], FAINT, 0.8)
        yield _text(_LEFT - 8, height + 4, f"{10.0**power:g}", INK, anchor="end")


def _seconds(start: float, end: float, x: Scale) -> Iterator[str]:
    span = end - start
    step = next(
        (nice for nice in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600) if span / nice <= 10), 7200
    )
    for tick in range(0, int(span) + 1, step):
        label = f"{tick} s" if span <= 300 else f"{tick / 60:g} min"
        yield _text(x(start + tick), _HEIGHT - _BOTTOM + 18, label, INK, anchor="middle")


def _milliseconds(low: float, high: float, x: Scale) -> Iterator[str]:
    for power in range(-2, 6):
        for first in (1, 2, 5):
            ms = first * 10.0**power
            if low <= ms * 1000 <= high:
                yield _line([(x(ms * 1000), _HEIGHT - _BOTTOM), (x(ms * 1000), _TOP + 20)], FAINT, 0.8)
                yield _text(x(ms * 1000), _HEIGHT - _BOTTOM + 18, f"{ms:g} ms", INK, anchor="middle")


def _linear(low: float, high: float, first: float, last: float) -> Scale:
    return lambda value: first + (last - first) * (value - low) / (high - low or 1.0)


def _logarithmic(low: float, high: float, first: float, last: float) -> Scale:
    inner = _linear(math.log(low), math.log(high), first, last)
    return lambda value: inner(math.log(min(max(value, low), high)))


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _area(points: Sequence[tuple[float, float]], colour: str) -> str:
    floor = _HEIGHT - _BOTTOM
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((points[0][0], floor), *points, (points[-1][0], floor)))
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.14"/>'


def _text(x: float, y: float, text: str, colour: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )


def _svg(parts: Sequence[str], label: str) -> str:
    box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'
