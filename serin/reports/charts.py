"""The drawing kit of every page: shapes, scales and axes as SVG text without external resources; charts that several
pages use (bars in rows, curves in panels, a histogram with a line over it); and short numbers.

A colour is a name of `DAY`. Inside a page it follows the page's palette, in light and dark mode. A drawing that is a
file or an image has a white background and the light colours.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

DAY: Final = {
    "ink": "#1d2733", "dim": "#5b6570", "page": "#f6f7f9", "card": "#ffffff", "edge": "#dde2e8", "soft": "#eef1f5",
    "bar": "#a9c1dd", "line": "#c8501e", "blue": "#1f5fa8", "orange": "#d9731a", "alarm": "#b3261e", "good": "#1f7d5c",
    "pale": "#6c8fb5", "grey": "#7a828c", "purple": "#8a4fa3", "olive": "#8c7a1f", "sky": "#3d8fb0", "rose": "#a35f8a",
}  # fmt: skip
NIGHT: Final = {
    "ink": "#e6eaef", "dim": "#97a3b0", "page": "#14181d", "card": "#1c2229", "edge": "#2d353f", "soft": "#252c35",
    "bar": "#47658a", "line": "#f08a54", "blue": "#6aa5e8", "orange": "#f0a058", "alarm": "#f2776e", "good": "#4fc596",
    "pale": "#93afcf", "grey": "#9aa3ad", "purple": "#c08fd8", "olive": "#c9b558", "sky": "#6fbddc", "rose": "#d795be",
}  # fmt: skip
SERIES: Final = ("good", "purple", "sky", "olive", "rose", "pale", "grey")
"""Colours for lines without a fixed meaning, in the order of use."""

Points = Sequence[tuple[float, float]]
Anchor = Literal["start", "middle", "end"]
Form = Callable[[float], str]
Floats = npt.NDArray[np.float64]
WIDTH = 360  # of a chart in a column's card
_PANEL, _SIDE = 170, 64
_LARGEST = sys.float_info.max
_LARGEST_SHOWN = 1.79e308  # rounding the largest float to three digits gives a number that no float holds
_LAST_MOMENT = 2**63 - 10**12  # in microseconds; numpy has no day for the next ones


def palette() -> str:
    """Returns the colours as variables of a page's style sheet."""
    day, night = ("".join(f"--{name}:{code};" for name, code in each.items()) for each in (DAY, NIGHT))
    return f":root{{{day}}}@media(prefers-color-scheme:dark){{:root{{{night}}}}}"


def var(colour: str) -> str:
    """Returns the colour as a variable of the page's palette."""
    assert colour in DAY, colour
    return f"var(--{colour})"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps low .. high to first .. last, in pixels. Values outside are drawn at the end."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(value) - low) / (high - low or 1.0)
        else:  # halves: the difference of two numbers near the largest may overflow
            share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2 or 1.0)
        return self.first + (self.last - self.first) * share

    def ticks(self, most: int = 8) -> list[float]:
        """Returns round values on the scale: 1, 2 and 5 of each power of ten, or as many steps of such a size as
        fit."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1,)):
                found = [digit * 10.0**power for power in powers for digit in digits]
                found = [value for value in found if self.low <= value <= self.high]
                if len(found) <= most:
                    break
            return found
        span = self.high - self.low
        if not 0 < span < math.inf:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(size * power for size in (1, 2, 5, 10) if span / (size * power) <= most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


class Drawing:
    """Shapes in the order in which they were added; positions are pixels from the upper left."""

    def __init__(self, width: float, height: float, *, font: float = 12) -> None:
        self.width, self.height, self.font = width, height, font
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1
    ) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
            f'fill="{var(colour)}"{_faint("fill", opacity)}/>'
        )

    def line(
        self,
        points: Points,
        colour: str,
        *,
        width: float = 1.6,
        dashes: str = "",
        opacity: float = 1,
        title: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{_path(points)}" fill="none" stroke="{var(colour)}" stroke-width="{width:g}"'
            f"{dashed}{_faint('stroke', opacity)}{_closed('polyline', title)}"
        )

    def area(self, points: Points, colour: str, *, opacity: float = 0.14) -> None:
        self._parts.append(
            f'<polygon points="{_path(points)}" fill="{var(colour)}"{_faint("fill", opacity)}/>'
        )

    def dot(
        self, x: float, y: float, colour: str, *, radius: float = 2.5, ring: bool = False, title: str = ""
    ) -> None:
        paint = f'fill="none" stroke="{var(colour)}" stroke-width="1.5"' if ring else f'fill="{var(colour)}"'
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {paint}{_closed("circle", title)}'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = "dim",
        anchor: Anchor = "start",
        bold: bool = False,
        halo: bool = False,
        title: str = "",
    ) -> None:
        """Adds text. `halo` makes it readable over lines."""
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        weight = ' font-weight="bold"' if bold else ""
        around = f' stroke="{var("card")}" stroke-width="4" paint-order="stroke"' if halo else ""
        hint = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{var(colour)}"{placed}{weight}{around}>{hint}{escape(text)}</text>'
        )

    def embedded(self, label: str) -> str:
        """Returns the SVG for a page with the palette, as wide as its container."""
        return self._svg(f'role="img" aria-label="{escape(label)}"', "")

    def standalone(self) -> str:
        """Returns the SVG for a file or an image: with its own size, on white."""
        ground = f'<rect width="100%" height="100%" fill="{var("card")}"/>'
        size = f'xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}"'
        return re.sub(r'="var\(--(\w+)\)"', lambda found: f'="{DAY[found[1]]}"', self._svg(size, ground))

    def _svg(self, how: str, ground: str) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" {how} '
            f'font-family="system-ui, sans-serif" font-size="{self.font:g}">{ground}{"".join(self._parts)}</svg>'
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """Draws shapes by the values of two scales. `y` runs upwards: its first pixel is below its last."""

    drawing: Drawing
    x: Scale
    y: Scale

    def line(
        self, points: Points, colour: str, *, width: float = 1.6, dashes: str = "", title: str = ""
    ) -> None:
        """Draws a line. A value that is not finite breaks it."""
        for known in unbroken(points):
            self.drawing.line(self._pixels(known), colour, width=width, dashes=dashes, title=title)

    def area(self, points: Points, colour: str) -> None:
        """Fills the area between the points and the lower end of `y`."""
        floor = [(x, self.y.low) for x, _ in points]
        self.drawing.area(self._pixels([*points, *reversed(floor)]), colour)

    def bar(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        colour: str,
        *,
        gap: float = 1,
        opacity: float = 1,
    ) -> None:
        left, right, low, high = self.x(x[0]), self.x(x[1]), self.y(y[0]), self.y(y[1])
        self.drawing.rect(left, high, max(right - left - gap, 0.5), low - high, colour, opacity=opacity)

    def dot(
        self, x: float, y: float, colour: str, *, radius: float = 2.5, ring: bool = False, title: str = ""
    ) -> None:
        self.drawing.dot(self.x(x), self.y(y), colour, radius=radius, ring=ring, title=title)

    def columns(self, ticks: Sequence[float], form: Form, *, lines: bool = True) -> None:
        """Draws values of `x` below the axes, with a line through each."""
        for value in ticks:
            place = self.x(value)
            if lines:
                self.drawing.line([(place, self.y.first), (place, self.y.last)], "edge", width=0.8)
            self.drawing.text(place, self.y.first + 16, form(value), anchor="middle")

    def rows(self, ticks: Sequence[float], form: Form) -> None:
        """Draws values of `y` left of the axes, with a line through each."""
        for value in ticks:
            place = self.y(value)
            self.drawing.line([(self.x.first, place), (self.x.last, place)], "edge", width=0.8)
            self.drawing.text(self.x.first - 6, place + 4, form(value), anchor="end")

    def limit(self, y: float, colour: str) -> float:
        """Draws a dashed line across and returns its pixel."""
        place = self.y(y)
        self.drawing.line([(self.x.first, place), (self.x.last, place)], colour, width=1.3, dashes="6 4")
        return place

    def _pixels(self, points: Points) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in points]


def unbroken(points: Points) -> Iterator[list[tuple[float, float]]]:
    """Returns the runs of consecutive points whose values are finite."""
    for known, group in groupby(points, key=lambda point: math.isfinite(point[1])):
        if known:
            yield list(group)


def _path(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _faint(what: str, opacity: float) -> str:
    return "" if opacity >= 1 else f' {what}-opacity="{opacity:.3g}"'


def _closed(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"


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
    """Draws a bar for each row, from zero on one scale: to the right, or to the left where a value is negative."""
    drawing = Drawing(width, 8 + row * len(rows), font=row / 2 if row >= 24 else 10.5)
    values = [0.0, *(bar.value for bar in rows)]
    least, most = min(values), max(values)
    room = 0.0 if least == 0 else 6 * drawing.font  # for the text of a bar to the left
    x = Scale(least, most if most > least else 1.0, label + room, 0.7 * width)
    zero = x(0.0)
    longest = int(label / (0.6 * drawing.font)) - 1
    for index, bar in enumerate(rows):
        top, end = 4 + index * row, x(bar.value)
        end = min(end, zero - 1) if bar.value < 0 else max(end, zero + 1)
        short = bar.label if len(bar.label) <= longest else bar.label[: longest - 1] + "…"
        hint = bar.label if short != bar.label else ""
        base = top + row / 2 + 4
        drawing.text(label - 6, base, short, colour="ink", anchor="end", title=hint)
        drawing.rect(min(zero, end), top + 3, abs(end - zero), row - 6, bar.colour)
        drawing.text(
            end + 5 if end > zero else end - 5, base, bar.text, anchor="start" if end > zero else "end"
        )
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


Line = tuple[str, str, str, Points]
"""A name, a colour, dashes and the points."""


def overlaid(lines: Sequence[Line], across: str) -> Drawing:
    """Draws lines over each other in one panel; `across` names the x axis."""
    drawing = Drawing(400, 210)
    shown = [[point for point in points if math.isfinite(point[1])] for *_, points in lines]
    xs = [x for points in shown for x, _ in points] or [0.0]
    ys = [y for points in shown for _, y in points] or [0.0]
    room = 0.05 * (max(ys) - min(ys)) or 0.01 * abs(max(ys)) or 1.0
    axes = Axes(
        drawing,
        Scale(min(xs), max(xs), 50, drawing.width - 14),
        Scale(min(ys) - room, max(ys) + room, drawing.height - 44, 12),
    )
    axes.rows(axes.y.ticks(5), lambda value: f"{value:.4g}")
    whole = [tick for tick in axes.x.ticks() if tick == int(tick)]
    axes.columns(whole, lambda value: f"{value:g}", lines=False)
    for (name, colour, dashes, _), points in zip(lines, shown, strict=True):
        axes.line(points, colour, width=2, dashes=dashes, title=name)
        for x, y in points if len(points) <= 30 else ():
            axes.dot(x, y, colour, title=f"{name}: {y:.6g} at {x:g}")
    drawing.text(drawing.width / 2, drawing.height - 6, across, anchor="middle")
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
