"""A tuning as a picture (SVG): p99 over requests/s, a line for each setting, a point for each number of clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Literal

Role = Literal["chosen", "before", "passed over", "other"]
Scale = Callable[[float], float]

_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 460, 64, 112, 20, 48
_COLOURS = {"chosen": "#0b7a53", "before": "#2b5fb4", "passed over": "#b8651b", "other": "#b9bec7"}
_LIMIT = "#c0392b"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """What one number of clients in a closed loop measured."""

    clients: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLine:
    """The measurements of one setting."""

    role: Role
    settings: str
    points: tuple[LoadPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningChart:
    """`best`: the highest load of the chosen setting within `p99_ms`. `legend`: one line of text per role."""

    title: str
    p99_ms: float
    lines: tuple[TuningLine, ...]
    best: LoadPoint | None
    legend: Mapping[Role, str]


def draw(chart: TuningChart) -> str:
    """p99 is logarithmic. The chosen line says how many clients there were; a ring is around its best point."""
    points = [point for line in chart.lines for point in line.points]
    fastest = max(point.requests_per_s for point in points) * 1.05
    low = min(point.p99_ms for point in points) / 1.3
    high = max(*(point.p99_ms for point in points), chart.p99_ms) * 1.3

    def x(requests_per_s: float) -> float:
        return _LEFT + requests_per_s / fastest * (_WIDE - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        share = math.log(ms / low) / math.log(high / low)
        return _HIGH - _BOTTOM - share * (_HIGH - _BOTTOM - _TOP)

    parts = [*_axes(fastest, low, high, x, y), _limit(chart.p99_ms, y)]
    for role in ("other", "passed over", "before", "chosen"):
        for line in chart.lines:
            if line.role == role:
                parts += _line(line, x, y)
    parts += _best(chart.best, x, y)
    parts += _legend(chart)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _axes(fastest: float, low: float, high: float, x: Scale, y: Scale) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(fastest)) / 2
    for number in range(int(fastest / step) + 1):
        at = x(number * step)
        yield f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HIGH - _BOTTOM}" stroke="#eee"/>'
        yield _text(at, _HIGH - _BOTTOM + 16, f"{number * step:,g}", anchor="middle")
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            ms = digit * 10.0**exponent
            if low <= ms <= high:
                yield f'<line x1="{_LEFT}" y1="{y(ms):.1f}" x2="{_WIDE - _RIGHT}" y2="{y(ms):.1f}" stroke="#eee"/>'
                yield _text(_LEFT - 6, y(ms) + 4, f"{ms:g}", anchor="end")
    yield _text(_WIDE / 2, _HIGH - 10, "requests/s", anchor="middle")
    yield _text(_LEFT - 6, _TOP - 8, "p99, ms", anchor="end")


def _limit(p99_ms: float, y: Scale) -> str:
    at = y(p99_ms)
    words = _text(_WIDE - _RIGHT, at - 5, f"at most {p99_ms:g} ms", anchor="end", fill=_LIMIT)
    return (
        f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDE - _RIGHT}" y2="{at:.1f}" stroke="{_LIMIT}" '
        f'stroke-dasharray="5 4"/>\n{words}'
    )


def _line(trial: TuningLine, x: Scale, y: Scale) -> Iterator[str]:
    role = trial.role
    places = [(x(point.requests_per_s), y(point.p99_ms)) for point in trial.points]
    joined = " ".join(f"{left:.1f},{down:.1f}" for left, down in places)
    width = 1 if role == "other" else 2
    yield (
        f'<polyline points="{joined}" fill="none" stroke="{_COLOURS[role]}" stroke-width="{width}">'
        f"<title>{escape(trial.settings)}</title></polyline>"
    )
    for (left, down), point in zip(places, trial.points, strict=True):
        yield (
            f'<circle cx="{left:.1f}" cy="{down:.1f}" r="3" fill="{_COLOURS[role]}"><title>{point.clients} clients: '
            f"{point.requests_per_s:,.0f} requests/s, p99 {point.p99_ms:.2f} ms</title></circle>"
        )
        if role == "chosen":
            yield _text(left + 6, down - 6, str(point.clients), fill=_COLOURS[role])


def _best(best: LoadPoint | None, x: Scale, y: Scale) -> Iterator[str]:
    if best:
        yield (
            f'<circle cx="{x(best.requests_per_s):.1f}" cy="{y(best.p99_ms):.1f}" r="7" fill="none" '
            f'stroke="{_COLOURS["chosen"]}" stroke-width="1.5"/>'
        )


def _legend(chart: TuningChart) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="18" font-weight="600">{escape(chart.title)}</text>'
    for row, (role, text) in enumerate(chart.legend.items()):
        down = 36 + 16 * row
        yield f'<rect x="{_LEFT}" y="{down - 9}" width="10" height="10" fill="{_COLOURS[role]}"/>'
        yield _text(_LEFT + 16, down, text)


def _text(left: float, down: float, text: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{left:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
