"""A tuning as a picture (SVG): p99 over requests/s, a line for each setting, a point for each number of clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape

from serin.serving.triton.tuned import cores
from serin.serving.tuning.requests import in_words
from serin.serving.tuning.trials import Trial, Tuning

Scale = Callable[[float], float]

_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 460, 64, 112, 20, 48
_COLOURS = {"chosen": "#0b7a53", "before": "#2b5fb4", "passed over": "#b8651b", "other": "#b9bec7"}
_LIMIT = "#c0392b"


def draw(tuning: Tuning) -> str:
    """p99 is logarithmic. The chosen line says how many clients there were; a ring is around its best point."""
    shown = [trial for trial in tuning.trials if trial.points]
    points = [point for trial in shown for point in trial.points]
    fastest = max(point.requests_per_s for point in points) * 1.05
    low = min(point.p99_ms for point in points) / 1.3
    high = max(*(point.p99_ms for point in points), tuning.p99_ms) * 1.3

    def x(requests_per_s: float) -> float:
        return _LEFT + requests_per_s / fastest * (_WIDE - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        share = math.log(ms / low) / math.log(high / low)
        return _HIGH - _BOTTOM - share * (_HIGH - _BOTTOM - _TOP)

    parts = [*_axes(fastest, low, high, x, y), _limit(tuning.p99_ms, y)]
    for role in ("other", "passed over", "before", "chosen"):
        for trial in shown:
            if _role(tuning, trial) == role:
                parts += _line(trial, role, x, y)
    parts += _best(tuning, x, y)
    parts += _legend(tuning)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _role(tuning: Tuning, trial: Trial) -> str:
    if trial.settings == tuning.chosen.settings:
        return "chosen"
    if tuning.passed_over and trial.settings == tuning.passed_over.settings:
        return "passed over"
    return "before" if trial.settings == tuning.before.settings else "other"


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


def _line(trial: Trial, role: str, x: Scale, y: Scale) -> Iterator[str]:
    places = [(x(point.requests_per_s), y(point.p99_ms)) for point in trial.points]
    joined = " ".join(f"{left:.1f},{down:.1f}" for left, down in places)
    width = 1 if role == "other" else 2
    yield (
        f'<polyline points="{joined}" fill="none" stroke="{_COLOURS[role]}" stroke-width="{width}">'
        f"<title>{escape(str(trial.settings))}</title></polyline>"
    )
    for (left, down), point in zip(places, trial.points, strict=True):
        yield (
            f'<circle cx="{left:.1f}" cy="{down:.1f}" r="3" fill="{_COLOURS[role]}"><title>{point.clients} clients: '
            f"{point.requests_per_s:,.0f} requests/s, p99 {point.p99_ms:.2f} ms</title></circle>"
        )
        if role == "chosen":
            yield _text(left + 6, down - 6, str(point.clients), fill=_COLOURS[role])


def _best(tuning: Tuning, x: Scale, y: Scale) -> Iterator[str]:
    best = tuning.chosen.best(tuning.p99_ms)
    if best:
        yield (
            f'<circle cx="{x(best.requests_per_s):.1f}" cy="{y(best.p99_ms):.1f}" r="7" fill="none" '
            f'stroke="{_COLOURS["chosen"]}" stroke-width="1.5"/>'
        )


def _legend(tuning: Tuning) -> Iterator[str]:
    bundle = tuning.bundle
    title = f"{bundle.model} version {bundle.version}, {cores()} cores, requests of {in_words(tuning.mix)}"
    yield f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>'
    best = tuning.chosen.best(tuning.p99_ms)
    figure = (
        f": {best.requests_per_s:,.0f}/s at {best.clients} clients (ring; numbers are clients)"
        if best
        else ""
    )
    lines = {"chosen": f"chosen: {tuning.chosen.settings}{figure}"}
    if tuning.better:
        lines["before"] = (
            f"before: {tuning.before.settings}; chosen gave {tuning.gain:.2f} times as many in turns"
        )
    if tuning.passed_over:
        gave = f"gave {tuning.passed_over_gain:.2f} times as many in turns"
        lines["passed over"] = f"best of the search: {tuning.passed_over.settings}; {gave}"
    lines["other"] = "other settings that were tried"
    for row, (role, text) in enumerate(lines.items()):
        down = 36 + 16 * row
        yield f'<rect x="{_LEFT}" y="{down - 9}" width="10" height="10" fill="{_COLOURS[role]}"/>'
        yield _text(_LEFT + 16, down, text)


def _text(left: float, down: float, text: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{left:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
