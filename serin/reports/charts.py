"""Small inline SVG charts. Each is a string; nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
WIDTH, HEIGHT = 360, 132
_TOP, _BOTTOM = 8, 18
_LEFT, _RIGHT = 4, 46


def number(value: float) -> str:
    """Short, for people: 1.2k, 3.4M, 0.0123."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def moment(microseconds: float) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d")


def percent(share: float) -> str:
    """Shares close to 0 and to 1 keep a digit that tells them from none and from all."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.1%}" if share not in (0.0, 1.0) else f"{share:.0%}"


def histogram(
    heights: Floats, low: str, high: str, line: Sequence[tuple[float, float]], mean: float, show: str
) -> str:
    """Bars of equal width; over them the target's mean by place (0 .. 1 from left to right), on a scale of its own."""
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    top = max(float(heights.max(initial=0.0)), 1e-12)
    step = width / max(len(heights), 1)
    parts = [
        f'<rect class="bar" x="{_LEFT + index * step:.1f}" y="{_TOP + height * (1 - each / top):.1f}" '
        f'width="{max(step - 1, 0.5):.1f}" height="{height * each / top:.1f}"/>'
        for index, each in enumerate(heights)
        if each > 0
    ]
    parts.append(f'<text class="axis" x="{_LEFT}" y="{HEIGHT - 4}">{escape(low)}</text>')
    parts.append(
        f'<text class="axis" x="{_LEFT + width}" y="{HEIGHT - 4}" text-anchor="end">{escape(high)}</text>'
    )
    parts += _curve(line, mean, show, width, height)
    return _svg(parts, HEIGHT)


def _curve(
    line: Sequence[tuple[float, float]], mean: float, show: str, width: float, height: float
) -> list[str]:
    values = [value for _, value in line] + [mean]
    low, high = min(values), max(values)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5

    def y(value: float) -> float:
        return _TOP + 4 + (height - 8) * (1 - (value - low) / (high - low))

    points = " ".join(f"{_LEFT + place * width:.1f},{y(value):.1f}" for place, value in line)
    end = _LEFT + width
    parts = [f'<line class="mean" x1="{_LEFT}" x2="{end}" y1="{y(mean):.1f}" y2="{y(mean):.1f}"/>']
    parts += [f'<polyline class="line" points="{points}"/>'] if len(line) > 1 else []
    if len(line) <= 40:
        parts += [
            f'<circle class="dot" cx="{_LEFT + place * width:.1f}" cy="{y(value):.1f}" r="2"/>'
            for place, value in line
        ]
    for value in (low, high):
        parts.append(f'<text class="scale" x="{end + 5}" y="{y(value) + 3:.1f}">{_shown(value, show)}</text>')
    return parts


def ranking(labels: Sequence[str], shares: Floats, means: Floats, mean: float, show: str) -> str:
    """One row per value: its name, how common it is, and the target's mean there."""
    row, bar_left, bar_width = 17, 128, 120
    top = max(float(shares.max(initial=0.0)), 1e-12)
    parts = []
    for index, (label, share, value) in enumerate(zip(labels, shares, means, strict=True)):
        y = 4 + index * row
        text = label if len(label) <= 18 else label[:17] + "…"
        parts.append(
            f'<text class="label" x="{bar_left - 6}" y="{y + 11}" text-anchor="end"><title>{escape(label)}</title>'
            f"{escape(text)}</text>"
            f'<rect class="bar" x="{bar_left}" y="{y + 2}" width="{bar_width * share / top:.1f}" height="11"/>'
            f'<text class="axis" x="{bar_left + bar_width * share / top + 4:.1f}" y="{y + 11}">{percent(share)}</text>'
        )
        if np.isfinite(value):
            kind = "up" if value > mean else "down"
            parts.append(
                f'<text class="scale {kind}" x="{WIDTH - 4}" y="{y + 11}" text-anchor="end">'
                f"{_shown(value, show)}</text>"
            )
    return _svg(parts, 8 + row * len(labels))


def _shown(value: float, show: str) -> str:
    return percent(value) if show == "share" else number(value)


def _svg(parts: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
