"""Bins and expressions: the same value gives the same bin and the same bits, whatever computes them."""

import datetime as dt
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pytest

from serin.columns.bins import bin_codes, count_rows, encode_hashes
from serin.columns.column import Column, column_from_arrow, column_from_wire
from serin.columns.derived import derive, typed
from serin.columns.expression2onnx import expression_to_onnx
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import BundleBroken
from serin.expressions import ExpressionError
from serin.formats.drift import FILE, BinnedColumn, DriftStatistics, Segment, read_drift
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, Kind
from tests.fakes.drift import category_column, series_of, statistics_of

NUMBER = BinnedColumn(name="x", field="x", source="request", kind="number", edges=(0.0, 1.0, 2.0, 5.0))


def codes(column: BinnedColumn, values: pa.Array) -> list[int]:
    found = bin_codes(column, pa.table({column.field: values}))
    assert found is not None
    return [int(code) for code in found]


def test_numbers_fall_between_edges_below_above_or_into_null() -> None:
    values = [0, 0.5, 1, 2, 5, 5.1, -0.1, None, float("nan"), float("inf"), float("-inf")]
    assert codes(NUMBER, pa.array(values, pa.float32())) == [0, 0, 1, 2, 2, 4, 3, 5, 5, 4, 3]
    assert NUMBER.labels == ("0 to 1", "1 to 2", "2 to 5", "below 0", "above 5", "null")


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.float64(), pa.float32(), pa.float16()])
def test_a_number_is_in_the_same_bin_in_every_type(kind: pa.DataType) -> None:
    assert codes(NUMBER, pa.array([0, 1, 2, 5, 6, None]).cast(kind)) == [0, 1, 2, 2, 4, 5]


def test_a_constant_column_has_one_inner_bin() -> None:
    column = BinnedColumn(name="x", field="x", source="request", kind="number", edges=(3.0,))
    assert codes(column, pa.array([3.0, 2.0, 4.0, None])) == [0, 1, 2, 3]
    assert (column.bins, column.labels) == (4, ("3", "below 3", "above 3", "null"))


def test_categories_are_frequent_known_unseen_or_null() -> None:
    column = BinnedColumn(
        name="c", field="c", source="request", kind="category", categories=("AA", "B6"),
        known=encode_hashes(pa.array(["UA", "DL"])),
    )  # fmt: skip
    values = pa.array(["AA", "B6", "UA", "DL", "XX", None, ""])
    assert codes(column, values) == codes(column, values.dictionary_encode()) == [0, 1, 2, 2, 3, 4, 4]


def test_without_hashes_every_other_value_counts_as_the_rest() -> None:
    column = BinnedColumn(
        name="c", field="c", source="request", kind="category", categories=("AA",), known=None
    )
    assert codes(column, pa.array(["AA", "ZZ", None])) == [0, 1, 3]


def test_integers_and_booleans_are_categories_by_their_text() -> None:
    column = category_column("c", ["1", "2"])
    assert codes(column, pa.array([1, 2, 3, None])) == [0, 1, 3, 4]
    assert codes(column, pa.array([1.0, 2.0, 3.0, None])) == [0, 1, 3, 4]
    assert codes(category_column("c", ["true", "false"]), pa.array([True, False, None])) == [0, 1, 4]


def test_timestamps_fall_into_hours_of_the_day() -> None:
    column = BinnedColumn(name="t", field="t", source="request", kind="timestamp")
    moments = [
        dt.datetime(2013, 1, 1, 5, 59, tzinfo=dt.UTC),
        dt.datetime(2020, 7, 1, 23, tzinfo=dt.UTC),
        None,
    ]
    assert codes(column, pa.array(moments, pa.timestamp("us", tz="UTC"))) == [5, 23, 24]


def test_an_element_of_a_list_is_a_column() -> None:
    column = BinnedColumn(
        name="p", field="p", source="score", kind="number", element=1, edges=(0.0, 0.5, 1.0)
    )
    assert codes(column, pa.array([[0.9, 0.1], [0.2, 0.8], None])) == [0, 1, 4]


def test_a_table_without_the_column_counts_nothing() -> None:
    statistics = statistics_of([category_column("c", "ab")], [series_of(0, (0.5, 0.5, 0, 0, 0))])
    found = count_rows(statistics, pa.table({"d": [1, 2]}), np.array([0.0, 61.0]))
    assert (found.starts.tolist(), found.counts.sum()) == ([0, 60], 0)


def test_rows_are_counted_by_ten_seconds_and_segment() -> None:
    share = (0.5, 0.5, 0.0, 0.0, 0.0)
    statistics = statistics_of(
        [category_column("c", "ab"), category_column("s", "xy")],
        [
            series_of(0, share),
            series_of(0, share, segment=Segment(column=1, category=1)),
            series_of(1, share),
        ],
    )
    table = pa.table({"c": ["a", "b", "a", "z"], "s": ["x", "y", "y", None]})
    found = count_rows(statistics, table, np.array([125.0, 0.0, 9.0, 129.9]))
    assert found.starts.tolist() == [0, 120]
    assert found.counts.tolist() == [
        [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_statistics_survive_their_file(tmp_path: Path) -> None:
    statistics = statistics_of(
        [category_column("c", "ab"), NUMBER],
        [
            series_of(0, (0.5, 0.5, 0, 0, 0), weight=0.5),
            series_of(1, (1.0, 0, 0, 0, 0, 0), weight=0.5, segment=Segment(column=0, category=1)),
        ],
    )
    (tmp_path / FILE).write_text(json.dumps(statistics.to_json()))
    read = read_drift(tmp_path)
    assert isinstance(read, DriftStatistics)
    assert (read, read.digest()) == (statistics, statistics.digest())
    assert read.segment_name(Segment(column=0, category=1)) == "c=b"


def test_a_bundle_may_have_no_statistics_but_not_broken_ones(tmp_path: Path) -> None:
    assert read_drift(tmp_path) is None
    (tmp_path / FILE).write_text('{"format": "serin.drift", "version": 1}')
    with pytest.raises(BundleBroken, match=r"drift\.json"):
        read_drift(tmp_path)


ROWS = 64
KINDS: dict[str, Kind] = {
    "f": "float",
    "g": "float",
    "i": "int",
    "j": "int",
    "b": "bool",
    "s": "string",
    "t": "timestamp",
}


def _columns() -> dict[str, Column]:
    draw = np.random.default_rng(3)
    special = np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3.4e38, -1.5], np.float32)

    def floats() -> Any:
        return np.where(
            draw.random(ROWS) < 0.4, draw.choice(special, ROWS), draw.normal(size=ROWS) * 7
        ).astype(np.float32)

    def ints() -> Any:
        return draw.choice(np.asarray([INT64_NULL, 0, -1, 1, 2**53 + 1, -(2**62), 7, -3]), ROWS)

    texts = draw.choice(np.asarray(["", "a", "b", "ä", "a b"], object), ROWS)
    return {
        "f": column_from_wire(floats(), "float"),
        "g": column_from_wire(floats(), "float"),
        "i": column_from_wire(ints(), "int"),
        "j": column_from_wire(ints(), "int"),
        "b": column_from_wire(draw.choice(np.asarray([-1, 0, 1], np.int8), ROWS), "bool"),
        "s": column_from_wire(texts, "string"),
        "t": column_from_wire(
            draw.choice(np.asarray([INT64_NULL, 0, 1_700_000_000_000_000]), ROWS), "timestamp"
        ),
    }


COLUMNS = _columns()


def in_graph(text: str) -> Any:
    expression = typed(text, KINDS)
    graph = GraphBuilder("x/")
    made = expression_to_onnx(graph, expression, {name: name for name in expression.kinds})
    made = graph.op("Identity", made)
    model = graph.to_model(
        {
            name: (ELEMENT_OF_DTYPE[DTYPE_OF_KIND[kind]], ("batch",))
            for name, kind in expression.kinds.items()
        },
        {made: (ELEMENT_OF_DTYPE[DTYPE_OF_KIND[expression.kind]], ("batch",))},
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: COLUMNS[name].to_wire() for name in expression.kinds})[0]


def same(text: str) -> None:
    expected = derive(typed(text, KINDS), COLUMNS, ROWS).to_wire()
    found = in_graph(text)
    if expected.dtype == np.float32:
        assert np.array_equal(np.isnan(expected), np.isnan(found)), text
        assert np.array_equal(
            np.nan_to_num(expected, nan=0).view(np.int32), np.nan_to_num(found, nan=0).view(np.int32)
        ), text
    else:
        assert np.array_equal(expected, found), text


@pytest.mark.parametrize(
    "text",
    [
        "f + g", "f - 1", "f * g", "f / g", "f / 0", "f % g", "i % j", "i % 5", "f % 3", "i + j", "i * 3", "i - f",
        "-f", "abs(f)", "abs(j)", "min(f, g)", "max(f, i)", "min(i, j)", "f > g", "f != g", "f <= i", "i == j",
        "b == true",
        "b and f > 0", "b or i > 3", "not b", "not (b and i > 0)", "is_null(f)", "is_null(s)", "is_null(f + 1)",
        "s == 'a'", "s != 'ä'", "s in ('a', 'b')", "i in (7, 0)", "f in (1.5, 0)", "b + 1", "(f > 0) + (g > 0)",
        "t > '2020-01-01'", "(t - 1) / 3600000000", "null", "f + null", "b and null", "b or null", "s", "t", "i",
        "f", "b",
        "is_null(1) or b", "min(f, 0) * max(g, 1) / (abs(i) + 1)", "i / j", "i > 1.5", "t == '2023-11-14T22:13:20'",
    ],
)  # fmt: skip
def test_the_graph_gives_the_same_bits(text: str) -> None:
    if text == "null":
        text = "f * null"
    same(text)


def test_random_expressions_give_the_same_bits() -> None:
    draw = random.Random(11)

    def number(depth: int) -> str:
        if depth == 0:
            return draw.choice(["f", "g", "i", "j", "b", "2", "0.5", "0", "null"])
        left, right = number(depth - 1), number(depth - 1)
        form = draw.choice(
            ["({} + {})", "({} - {})", "({} * {})", "({} / {})", "({} % {})", "min({}, {})", "max({}, {})"]
        )
        return draw.choice([form.format(left, right), f"abs({left})", f"(-{left})", f"({truth(depth - 1)})"])

    def truth(depth: int) -> str:
        if depth == 0:
            return draw.choice(["b", "s == 'a'", "is_null(s)", "f > 0", "true", "i in (7, 2)"])
        sign = draw.choice(["<", "<=", ">", ">=", "==", "!="])
        return draw.choice(
            [
                f"({truth(depth - 1)} and {truth(depth - 1)})", f"({truth(depth - 1)} or {truth(depth - 1)})",
                f"(not {truth(depth - 1)})", f"({number(depth - 1)} {sign} {number(depth - 1)})",
                f"is_null({number(depth - 1)})",
            ]
        )  # fmt: skip

    for _ in range(60):
        same(draw.choice([number, truth])(3) + draw.choice([" * f", " + i"]))


def test_what_is_asked_of_a_text_is_asked_once_per_different_text() -> None:
    column = column_from_arrow(pa.array(["x", None, "y", "x"]), "string")
    made = derive(typed("s == 'x' or is_null(s)", {"s": "string"}), {"s": column}, 4)
    assert made.values.tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [("s + 1", "strings have no arithmetic"), ("s > 3", "compared"), ("t > 'soon'", "'soon' is not a time")],
)
def test_an_expression_that_does_not_fit_its_columns_is_refused(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        typed(text, KINDS)


def test_only_the_order_of_texts_cannot_be_served() -> None:
    assert not typed("s > 'a' or b", KINDS).servable
    assert typed("s == 'a' or f > 1", KINDS).servable
