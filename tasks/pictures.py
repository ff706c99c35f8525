"""Small drawings for Prefect's pages, as SVG text: lines over steps, and bars. Nothing to import, nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 170, 64, 16, 26, 26
_BAR, _LABEL = 24, 190
_INK, _FAINT, _LINE = "#22272e", "#d8dde3", "#1f5fa8"

Points = Sequence[tuple[float, float]]


def curves(panels: Mapping[str, Points], across: str) -> str:
    """One panel below the other, each a line through its points; `across` is what they run over."""
    shown = {name: points for name, points in panels.items() if points}
    xs = [x for points in shown.values() for x, _ in points]
    parts = [
        part
        for index, (name, points) in enumerate(shown.items())
        for part in _panel(name, points, index * _PANEL, min(xs), max(xs))
    ]
    height = len(shown) * _PANEL + 16
    parts.append(_text(_WIDTH / 2, height - 4, across, anchor="middle"))
    return _svg(parts, height)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each (label, value, value in words), from zero on one scale."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    width = _WIDTH - _LABEL - 150
    parts = []
    for index, (label, value, words) in enumerate(rows):
        y, length = 8 + index * _BAR, max(1.0, width * value / most)
        parts.append(_text(_LABEL - 8, y + 15, label, anchor="end"))
        parts.append(f'<rect x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="16" fill="{_LINE}"/>')
        parts.append(_text(_LABEL + length + 6, y + 15, words))
    return _svg(parts, 16 + len(rows) * _BAR)


def _panel(name: str, points: Points, top: float, first: float, last: float) -> list[str]:
    low, high = min(y for _, y in points), max(y for _, y in points)
    span_x, span_y = (last - first) or 1.0, (high - low) or 1.0
    height, width = _PANEL - _TOP - _BOTTOM, _WIDTH - _LEFT - _RIGHT
    places = [
        (_LEFT + width * (x - first) / span_x, top + _TOP + height * (high - y) / span_y) for x, y in points
    ]
    ends = [(top + _TOP, high), (top + _TOP + height, low)] if high > low else [(top + _TOP, high)]
    parts = [_text(_LEFT, top + 16, name, bold=True)]
    for y, value in ends:
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_FAINT}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.4g}", anchor="end"))
    if len(places) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_LINE}"/>' for x, y in places]
    parts.append(_text(_LEFT, top + _PANEL - 8, f"{first:g}"))
    parts.append(_text(_WIDTH - _RIGHT, top + _PANEL - 8, f"{last:g}", anchor="end"))
    return parts


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}"{weight}>{escape(words)}</text>'
    )


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )
