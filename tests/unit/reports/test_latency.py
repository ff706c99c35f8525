from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from serin.formats.serving.request import Request
from serin.reports.latency import latency_chart
from serin.reports.svg import DAY


def requests(count: int, *, releases: int = 2) -> list[Request]:
    chance = random.Random(3)
    found = []
    for i in range(count):
        version = 1 + i % releases
        arm = "stable" if version == 1 else "candidate"
        us = chance.lognormvariate(9, 0.4) if i % 17 else None
        code = 503 if i % 50 == 1 else 200
        found.append(
            Request(
                1e9 + i / 10, "m", 1, arm, f"m-v{version}", code, None, us, us, 1, "-", "HTTP/1.1", str(i)
            )
        )
    return found


def chart(count: int, *, releases: int = 2) -> ET.Element:
    return ET.fromstring(latency_chart(requests(count, releases=releases), p99_ms=20.0, title="m: latency"))


@pytest.mark.parametrize("many", [0, 1, 40, 1500])
def test_a_chart_is_drawn_of_any_number_of_requests_and_inside_its_frame(many: int) -> None:
    root = chart(many)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    places = [
        tuple(map(float, pair.split(",")))
        for line in (*root.findall("{*}polyline"), *root.findall("{*}polygon"))
        for pair in line.attrib["points"].split()
    ]
    assert bool(places) == (many > 1)  # the first one failed
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_each_of_few_requests_is_a_dot() -> None:
    answered = {
        arm: sum(r.us is not None for r in requests(40) if r.arm == arm) for arm in ("stable", "candidate")
    }
    dots = [dot.attrib["fill"] for dot in chart(40).findall("{*}circle") if dot.attrib["r"] == "2"]
    assert (dots.count(DAY["blue"]), dots.count(DAY["orange"])) == (answered["stable"], answered["candidate"])


def test_every_arm_has_its_own_colour_and_the_promise_is_drawn() -> None:
    root = chart(1500)
    strokes = [line.attrib["stroke"] for line in root.findall("{*}polyline")]
    assert {DAY["blue"], DAY["orange"], DAY["alarm"]} <= set(strokes)
    assert "promised p99: 20 ms" in [text.text for text in root.findall("{*}text")]


def test_a_time_without_requests_breaks_the_line() -> None:
    seen = requests(3000)
    del seen[1000:2000]
    root = ET.fromstring(latency_chart(seen, p99_ms=20.0, title="m"))
    widest = [line for line in root.findall("{*}polyline") if line.attrib["stroke-width"] == "2"]
    assert [line.attrib["stroke"] for line in widest] == [DAY["blue"]] * 2 + [DAY["orange"]] * 2


def test_more_releases_than_colours_are_drawn_too() -> None:
    words = [text.text for text in chart(700, releases=9).findall("{*}text")]
    assert "and 5 more" in words
