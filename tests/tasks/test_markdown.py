"""Pages for Prefect's interface."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET

import pytest

from serin.store.receipt import measure
from tasks.markdown import drawing, picture, receipt_table, table
from tasks.pictures import bars, curves


def test_a_cell_cannot_break_its_table() -> None:
    assert table(("a", "b"), [("x|y", "two\nlines"), ("<img src=x>", 1234567)]) == (
        "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n| &lt;img src=x> | 1,234,567 |\n"
    )


def test_numbers_are_shown_with_four_digits_and_no_false_precision() -> None:
    assert table(("n",), [(0.123456789,), (12345.678,)]) == "| n |\n| --- |\n| 0.1235 |\n| 12,346 |\n"


def test_a_picture_travels_inside_its_page() -> None:
    png = b"\x89PNG..."
    assert picture(png, "latency") == f"![latency](data:image/png;base64,{base64.b64encode(png).decode()})\n"


def test_a_receipt_shows_what_was_measured_and_nothing_else() -> None:
    with measure("etl") as measurement:
        measurement.rows, measurement.work_s = 1000, 2.0
    assert measurement.receipt is not None
    page = receipt_table(measurement.receipt.to_json())
    assert "| rows/s | 500 |" in page
    assert "waiting" not in page
    assert "None" not in page


def test_a_drawing_travels_inside_its_page_and_none_leaves_nothing() -> None:
    assert drawing("<svg/>", "loss").startswith("![loss](data:image/svg+xml;base64,")
    assert drawing("", "loss") == ""


def test_curves_draw_every_point_of_every_panel_inside_the_picture() -> None:
    panels = {"loss <&>": [(10.0, 0.9), (20.0, 0.4), (30.0, 0.4)], "auc": [(30.0, 0.8)], "nothing": []}
    root = ET.fromstring(curves(panels, "steps"))
    height, dots = float(root.attrib["height"]), root.findall("{*}circle")
    assert len(dots) == 4
    assert all(0 <= float(dot.attrib["cy"]) <= height and 0 <= float(dot.attrib["cx"]) <= 720 for dot in dots)
    heights = [float(dot.attrib["cy"]) for dot in dots[:3]]
    assert heights[0] < heights[1] == heights[2]  # the larger value stands higher
    words = [text.text for text in root.findall("{*}text")]
    assert {"loss <&>", "auc", "steps", "0.9", "0.4"} <= set(words)
    assert "nothing" not in words


def test_bars_are_as_long_as_their_values() -> None:
    root = ET.fromstring(bars([("train", 800, "800"), ("test", 200, "200"), ("empty", 0, "0")]))
    lengths = [float(bar.attrib["width"]) for bar in root.findall("{*}rect")[1:]]
    assert lengths[0] == pytest.approx(4 * lengths[1], rel=0.01)
    assert lengths[2] == 1.0
