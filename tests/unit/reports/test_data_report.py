"""The data report: one page that needs nothing else, and numbers of any size that can be read."""

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.etl.dataset.relate_target import relate_to_target
from serin.etl.dataset.transform import TrainSample
from serin.formats.statistics import ColumnStatistics, NumberStatistics
from serin.reports.charts import (
    DAY,
    NIGHT,
    Bar,
    Drawing,
    Scale,
    bars,
    curves,
    histogram,
    moment,
    number,
    palette,
    percent,
)
from serin.reports.data_report import FILE, Bins, _identity, _numbers
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of, trips


class Page(HTMLParser):
    """Counts elements and gathers text; fails on tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("task", ["binary", "regression", "multiclass"])
def test_a_report_shows_every_column_and_needs_nothing_else(tmp_path: Path, task: str) -> None:
    expression = {"binary": "tip > 2", "regression": "tip", "multiclass": "kind"}[task]
    name = "<script>alert(1)</script> & 'more'"
    frame = trips().rename(columns={"zone": name}).assign(kind=np.digitize(trips()["tip"], [1, 2]))
    spec = spec_of(
        tmp_path,
        frame=frame,
        target={"expression": expression, "task": task},
        features=[
            {"columns": ["fare", "people"], "steps": ["fill_median", "normalize"]},
            {"columns": ["taxi", name], "steps": ["categorify"]},
            {"columns": ["start"], "steps": [{"date_parts": ["hour"]}]},
        ],
        checks=[{"column": "fare", "max": 20, "otherwise": "warn"}],
    )
    dataset = build(spec, Store(str(tmp_path / "store")))
    content = (Path(dataset.path) / FILE).read_text(encoding="utf-8")
    page = Page()
    page.feed(content)
    assert not page.open
    assert page.seen.count("svg") == 5
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert not re.search(r"https?://|url\(|@import", content)
    for text in ("900", expression, "'fare' breaks max: 20", "% null", name, "t1", "2024-01-"):
        assert text in page.text


def test_a_report_does_not_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(spec_of(tmp_path), Store(str(tmp_path / "one")))
    monkeypatch.setattr("serin.etl.dataset.transform.SAMPLE_ROWS", 100)
    assert build(spec_of(tmp_path), Store(str(tmp_path / "two"))).digest == first.digest


def test_what_bins_explain_is_a_share_of_the_variance() -> None:
    rows = np.asarray([50.0, 50.0, 0.0])
    sure = Bins(
        edges=None, values=(), rows=rows, target=np.asarray([50.0, 0, 0]), squares=np.asarray([50.0, 0, 0])
    )
    none = Bins(
        edges=None, values=(), rows=rows, target=np.asarray([25.0, 25, 0]), squares=np.asarray([25.0, 25, 0])
    )
    assert sure.explained() == pytest.approx(0.99, abs=0.011)
    assert none.explained() == 0


def test_figures_are_short() -> None:
    assert [number(value) for value in (0.012345, 12.345, 1234, 56789, 2.5e6, -3e9, 1e12, 1e17)] == [
        "0.0123", "12.3", "1234", "56.8k", "2.5M", "-3G", "1T", "1e17",
    ]  # fmt: skip
    assert [percent(value) for value in (0, 0.0001, 0.1234, 0.9999, 1)] == [
        "0%",
        "<0.1%",
        "12.3%",
        ">99.9%",
        "100%",
    ]


def test_years_and_other_narrow_whole_numbers_get_a_bar_each() -> None:
    years = np.asarray([1999, 2001, 2001, np.nan, 2004], np.float32)
    columns = {"built": Column(kind="float", values=years), "share": Column(kind="float", values=years / 2)}
    target = np.asarray([1, 0, 1, 1, 0], np.float32)
    known = NumberStatistics(kind="float", rows=5, nulls=1, edges=(1992.0, 2000.0, 2008.0), counts=(1, 3))
    bins = relate_to_target(
        TrainSample(columns=columns, target=target, share=1.0), dict.fromkeys(columns, known), {}, 1
    )
    assert bins["built"].whole
    assert bins["built"].edges is not None
    assert bins["built"].edges.tolist() == [1998.5, 1999.5, 2000.5, 2001.5, 2002.5, 2003.5, 2004.5]
    assert bins["built"].rows.tolist() == [1, 0, 2, 0, 0, 1, 1]
    assert bins["built"].target.tolist() == [1, 0, 1, 0, 0, 0, 1]
    assert not bins["share"].whole


@pytest.mark.parametrize(
    "values", [(-1.7e308, 0.0, 3.5, 1.7e308), (1e17,) * 4, (1.7e308,) * 4, (-9e18, 9e18)]
)
def test_the_largest_numbers_have_an_axis_too(values: tuple[float, ...]) -> None:
    rows = len(values)
    columns = {"x": Column(kind="float", values=np.asarray(values))}
    edges = tuple(sorted({*values, max(values) + (0 if len(set(values)) > 1 else 1e9)}))
    known = NumberStatistics(kind="float", rows=rows, nulls=0, edges=edges, counts=(1,) * (len(edges) - 1))
    target = (np.arange(rows) % 2).astype(np.float32)
    (bins,) = relate_to_target(
        TrainSample(columns=columns, target=target, share=1.0), {"x": known}, {}, 1
    ).values()
    chart, extent = _numbers(bins, known, 0.5, percent)
    assert not re.search("nan|inf", chart + extent)
    assert "<rect" in chart


UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)


def read_back(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)


@given(FINITE)
@example(999_999.0)
@example(999.9999)
@example(-9_999.6)
@example(9.007199254740993e15)
@example(1.7976931348623157e308)
@example(5e-324)
@example(-0.0)
def test_a_number_is_short_and_means_what_it_stands_for_to_three_digits(value: float) -> None:
    text = number(value)
    assert len(text) <= 10
    assert re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+|[kMGT])?", text), text
    assert read_back(text) == pytest.approx(value, rel=0.00501, abs=5e-324)


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_labels_are_in_the_order_of_their_numbers(values: list[float]) -> None:
    labels = [read_back(number(value)) for value in sorted(values)]
    assert labels == sorted(labels)


def bins_of(values: Any, target: Any = None) -> tuple[Bins, NumberStatistics]:
    """A column of numbers in the report's bins, with edges at its own values."""
    numbers = np.asarray(values, np.float64)
    edges = np.unique(numbers)
    edges = (
        np.append(edges, np.nextafter(edges[-1], np.inf)) if edges[-1] < np.finfo(np.float64).max else edges
    )
    edges = edges if len(edges) > 1 else np.asarray([np.nextafter(edges[0], -np.inf), edges[0]])
    counts = tuple(int(each) for each in np.histogram(numbers, edges)[0])
    known = NumberStatistics(
        kind="float", rows=len(numbers), nulls=0, edges=tuple(edges.tolist()), counts=counts
    )
    columns = {"x": Column(kind="float", values=numbers)}
    truth = np.arange(len(numbers)) % 2 if target is None else np.asarray(target)
    sample = TrainSample(columns=columns, target=truth.astype(np.float32), share=1.0)
    label = 1 if target is None else None
    (bins,) = relate_to_target(sample, {"x": known}, {}, label).values()
    return bins, known


@given(st.lists(FINITE, min_size=1, max_size=12))
@example([5e-324, 0.0])
@example([1.7976931348623157e308, -1.7976931348623157e308])
@example([1e308, 1e308])
@example([2.0**53, 2.0**53 + 2, 2.0**63])
def test_a_histogram_of_any_numbers_has_finite_shapes_and_an_axis_in_order(values: list[float]) -> None:
    bins, known = bins_of(values)
    chart, extent = _numbers(bins, known, 0.5, percent)
    assert not re.search("nan|inf", chart + extent)
    low, high = re.findall(r'y="128\.0"[^>]*>([^<]+)<', chart)
    assert read_back(low) <= read_back(high)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
def test_a_target_of_any_size_has_an_axis_in_order(target: list[float]) -> None:
    bins, known = bins_of(np.arange(len(target)) * 1.5, target)
    assert 0 <= bins.explained() <= 1
    mean = float(np.mean(target, dtype=np.float64))
    chart, _ = _numbers(bins, known, mean, number)
    assert not re.search("nan|inf", chart)
    shown = [read_back(each) for each in re.findall(r'fill="var\(--line\)">([^<]+)<', chart)]
    assert shown == sorted(shown)
    assert 1 <= len(shown) <= 2


def test_a_share_that_is_the_same_everywhere_is_written_once() -> None:
    line = [(0.1, 0.003), (0.9, 0.003)]
    chart = histogram(np.ones(4), ("1", "2"), line, 0.003, percent).embedded("shares")
    assert re.findall(r">([^<]*%)<", chart) == ["0.3%"]


def test_the_first_and_last_moments_of_64_bits_have_a_day() -> None:
    assert moment(2.0**63).startswith("2942")
    assert moment(-(2.0**63)).startswith("-2903")


@pytest.mark.parametrize(
    ("values", "is_id"),
    [
        (np.arange(2**53 + 1, 2**53 + 300), True),
        (np.random.default_rng(1).permutation(5000), True),
        (np.random.default_rng(1).permutation(500), False),
        (np.arange(5000) // 2, False),
        (np.asarray([f"k{row}" for row in range(1200)], object), True),
    ],
)
def test_an_id_is_shown_by_examples_instead_of_a_distribution(values: Any, is_id: bool) -> None:
    column = column_from_arrow(pa.array(values), "string" if values.dtype == object else "int")
    edges = (0.0, 1e16)
    known: ColumnStatistics = NumberStatistics(
        kind=column.kind, rows=len(values), nulls=0, edges=edges, counts=(len(values),)
    )
    sample = TrainSample(columns={"x": column}, target=np.zeros(len(values), np.float32), share=1.0)
    (bins,) = relate_to_target(sample, {"x": known}, {}, 1).values()
    assert bool(bins.examples) is is_id
    if is_id:
        page = _identity(bins, 1.0)
        assert f"<code>{values[0]}</code>" in page
        assert f"every one of {len(values):,} rows" in page
        assert bins.explained() == 0


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
