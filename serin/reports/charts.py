"""Charts that several pages use: bars in rows, curves in panels, a histogram with a line over it; and short numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.reports.svg import Axes, Drawing, Form, Points, Scale

Floats = npt.NDArray[np.float64]
WIDTH = 360  # of a chart in a column's card
_PANEL, _SIDE = 170, 64
_LARGEST = sys.float_info.max
_LARGEST_SHOWN = 1.79e308  # rounding the largest float to three digits gives a number that no float holds
_LAST_MOMENT = 2**63 - 10**12  # in microseconds; numpy has no day for the next ones


def number(value: float) -> str:
    """Writes a number short for people, with three digits at least: 1.2k, 3.4M, 0.0123, 9.01e15."""
    if not math.isfinite(value):
        return "not finite"
    value = min(max(value, -_LARGEST_SHOWN), _LARGEST_SHOWN)
    digits, _, exponent = f"{value + 0.0:.2e}".partition("e")
    power = int(exponent)
    if power == 3:
        return f"{value:.0f}"
    if 3 < power < 15:
        return f"{float(digits) * 10 ** (power % 3):.3g}{'kMGT'[power // 3 - 1]}"
    if -4 <= power < 3:
        return f"{float(f'{digits}e{power}'):.3g}"
    return f"{float(digits):.3g}e{power}"


def moment(microseconds: float) -> str:
    """Formats the day of a time since the epoch, also in years that datetime does not support."""
    whole = min(max(round(microseconds), -_LAST_MOMENT), _LAST_MOMENT)
    return str(np.datetime64(whole, "us").astype("datetime64[D]"))


def percent(share: float) -> str:
    """Formats a share; one close to 0 or 1 keeps a digit that distinguishes it from none and all."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.1%}" if share not in (0.0, 1.0) else f"{share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar. `text` is written at its end, `note` at the right of its row."""

    label: str
    value: float
    text: str
    note: str = ""
    colour: str = "blue"


def bars(rows: Sequence[Bar], *, width: float = 720, label: float = 190, row: float = 24) -> Drawing:
    """Draws a bar for each row, from zero on one scale."""
    drawing = Drawing(width, 8 + row * len(rows), font=row / 2 if row >= 24 else 10.5)
    most = max((bar.value for bar in rows), default=0.0) or 1.0
    x = Scale(0.0, most, label, 0.7 * width)
    longest = int(label / (0.6 * drawing.font)) - 1
    for index, bar in enumerate(rows):
        top, end = 4 + index * row, max(x(bar.value), label + 1)
        short = bar.label if len(bar.label) <= longest else bar.label[: longest - 1] + "…"
        hint = bar.label if short != bar.label else ""
        base = top + row / 2 + 4
        drawing.text(label - 6, base, short, colour="ink", anchor="end", title=hint)
        drawing.rect(label, top + 3, end - label, row - 6, bar.colour)
        drawing.text(end + 5, base, bar.text)
        if bar.note:
            drawing.text(width - 4, base, bar.note, colour="line", anchor="end")
    return drawing


def curves(panels: Mapping[str, Points], across: str) -> Drawing:
    """Draws one panel below the other, each a line through its finite points; `across` names the common x axis."""
    shown = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in panels.items()}
    shown = {name: points for name, points in shown.items() if points}
    drawing = Drawing(720, len(shown) * _PANEL + 16)
    xs = [x for points in shown.values() for x, _ in points] or [0.0]
    for index, (name, points) in enumerate(shown.items()):
        top = index * _PANEL
        low, high = min(y for _, y in points), max(y for _, y in points)
        axes = Axes(
            drawing,
            Scale(min(xs), max(xs), _SIDE, drawing.width - 16),
            Scale(low, high, top + _PANEL - 26, top + 26),
        )
        drawing.text(_SIDE, top + 16, name, colour="ink", bold=True)
        axes.rows(sorted({low, high}), lambda value: f"{value:.4g}")
        axes.line(points, "blue", width=2)
        for x, y in points:
            axes.dot(x, y, "blue")
        drawing.text(axes.x.first, top + _PANEL - 8, f"{min(xs):g}")
        drawing.text(axes.x.last, top + _PANEL - 8, f"{max(xs):g}", anchor="end")
    drawing.text(drawing.width / 2, drawing.height - 4, across, anchor="middle")
    return drawing


def histogram(heights: Floats, ends: tuple[str, str], line: Points, mean: float, form: Form) -> Drawing:
    """Draws bars of equal width and, over them, the target's mean by position (0 .. 1 from left to right).

    The mean has a second scale at the right. Dashed: `mean`, over all rows.
    """
    drawing = Drawing(WIDTH, 132, font=10.5)
    left, right, bottom, top = 4.0, WIDTH - 46.0, 114.0, 8.0
    most = max(float(heights.max(initial=0.0)), 1e-12)
    step = (right - left) / max(len(heights), 1)
    for index, each in enumerate(heights.tolist()):
        if each > 0:
            tall = (bottom - top) * min(each / most, 1.0)
            drawing.rect(left + index * step, bottom - tall, max(step - 1, 0.5), tall, "bar")
    drawing.text(left, 128, ends[0])
    drawing.text(right, 128, ends[1], anchor="end")
    if not math.isfinite(mean):
        return drawing
    values = [mean, *(value for _, value in line)]
    low, high = min(values), max(values)
    flat = high / 2 - low / 2 <= 1e-12 * max(abs(low), abs(high)) or form(low) == form(high)
    room = max(1e-9 * abs(mean), 0.5)
    scale = (max(low - room, -_LARGEST), min(high + room, _LARGEST)) if flat else (low, high)
    over = Axes(drawing, Scale(0.0, 1.0, left, right), Scale(*scale, bottom - 4, top + 4))
    drawing.line([(left, over.y(mean)), (right, over.y(mean))], "line", width=1, dashes="3 4", opacity=0.55)
    if len(line) > 1:
        over.line(line, "line")
    for x, y in line if len(line) <= 40 else ():
        over.dot(x, y, "line", radius=2)
    for value in (mean,) if flat else scale:
        drawing.text(right + 5, over.y(value) + 3, form(value), colour="line")
    return drawing
