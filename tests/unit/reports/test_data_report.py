"""The data report: one page that needs nothing else, says what was found, and cannot be broken by a name."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from serin.columns.column import Column
from serin.etl.dataset.relate_target import relate_to_target
from serin.etl.dataset.train_sample import TrainSample
from serin.formats.statistics import NumberStatistics
from serin.reports.charts import number, percent
from serin.reports.data_report import FILE, Bins, _numbers
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
    monkeypatch.setattr("serin.etl.dataset.train_sample.SAMPLE_ROWS", 100)
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


@pytest.mark.filterwarnings("error")
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
