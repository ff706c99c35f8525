"""The drawing kit: what is drawn has its place and its colour, whatever the numbers are."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from serin.reports.charts import Bar, bars, curves
from serin.reports.svg import DAY, NIGHT, Drawing, Scale, palette


def test_curves_draw_every_finite_point_of_every_panel_inside_the_picture() -> None:
    panels = {
        "loss <&>": [(10.0, 0.9), (20.0, 0.4), (30.0, 0.4)],
        "auc": [(20.0, math.nan), (30.0, 0.8)],
        "nothing": [],
    }
    root = ET.fromstring(curves(panels, "steps").standalone())
    height, dots = float(root.attrib["height"]), root.findall("{*}circle")
    assert len(dots) == 4
    assert all(0 <= float(dot.attrib["cy"]) <= height and 0 <= float(dot.attrib["cx"]) <= 720 for dot in dots)
    heights = [float(dot.attrib["cy"]) for dot in dots[:3]]
    assert heights[0] < heights[1] == heights[2]  # the larger value is drawn higher
    words = [text.text for text in root.findall("{*}text")]
    assert {"loss <&>", "auc", "steps", "0.9", "0.4"} <= set(words)
    assert "nothing" not in words


def test_bars_are_as_long_as_their_values() -> None:
    rows = [Bar(label=str(value), value=value, text=str(value)) for value in (800, 200, 0)]
    root = ET.fromstring(bars(rows).standalone())
    lengths = [float(bar.attrib["width"]) for bar in root.findall("{*}rect")[1:]]
    assert lengths[0] == pytest.approx(4 * lengths[1], rel=0.01)
    assert lengths[2] == 1.0


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0.0, 7.0, 0, 100), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
        (Scale(130.0, 890.0, 0, 100), [200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0]),
        (Scale(0.9, 30.0, 0, 100, log=True), [1.0, 2.0, 5.0, 10.0, 20.0]),
        (Scale(1e-2, 1e5, 0, 100, log=True), [10.0**power for power in range(-2, 6)]),
        (Scale(3.0, 3.0, 0, 100), [3.0]),
    ],
)
def test_ticks_are_round_and_few(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


def test_a_scale_is_exact_at_its_ends_also_for_the_largest_numbers() -> None:
    for log in (False, True):
        scale = Scale(1e-300 if log else -1.7e308, 1.7e308, 10, 90, log=log)
        assert [scale(scale.low), scale(scale.high)] == pytest.approx([10, 90])
    assert Scale(5.0, 5.0, 10, 90)(5.0) == 10
    assert Scale(0.0, 1.0, 10, 90)(7.0) == 90  # outside: at the end


def test_a_drawing_follows_the_page_s_palette_and_stands_alone_with_the_colours_of_the_day() -> None:
    drawing = Drawing(10, 10)
    drawing.text(1, 1, '<&> "var(--ink)"', colour="alarm", title="'quoted'")
    assert 'fill="var(--alarm)"' in drawing.embedded("a label")
    assert 'aria-label="a label"' in drawing.embedded("a label")
    alone = ET.fromstring(drawing.standalone())
    assert [part.attrib.get("fill") for part in alone] == [DAY["card"], DAY["alarm"]]
    assert "".join(alone.itertext()) == "'quoted'<&> \"var(--ink)\""
    assert DAY.keys() == NIGHT.keys()
    assert all(f"--{name}:{code};" in palette() for each in (DAY, NIGHT) for name, code in each.items())
