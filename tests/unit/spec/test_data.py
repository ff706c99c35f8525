"""What a data section may say: every problem at once, each with its key and its mend."""

from typing import Any

import pytest

from serin.errors import SpecError
from serin.spec.data import DataSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.relation import WindowColumn, WindowSpec, window_column


def spec_with(features: Any = ("x",), **data: Any) -> PipelineSpec:
    section = {"tables": {"main": "main.parquet"}, "target": {"expression": "y > 1", "task": "binary"}} | data
    chosen = [{"columns": list(features), "steps": ["normalize"]}]
    return load_spec({"name": "m", "data": section, "features": chosen})


@pytest.mark.parametrize(
    "entry",
    [
        "https://bob:s3cret@host/t.parquet",
        "https://s3cret@host/t.parquet",
        {"path": "ftp://bob:s3cret@host/t.csv", "delimiter": ";"},
        {"delta": "s3://KEY:s3cret@bucket/t"},
    ],
)
def test_a_table_whose_url_holds_a_password_is_refused_without_showing_it(entry: Any) -> None:
    with pytest.raises(SpecError, match=r"data\.tables\.main.*: the URL holds a password") as refused:
        spec_with(tables={"main": entry})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["abfss://box@account.dfs.core.windows.net/t.parquet", "hdfs://bob@host/t", "s3://bucket/a:b@c/t"]
)
def test_a_user_alone_may_be_in_the_url_of_a_table(url: str) -> None:
    assert spec_with(tables={"main": url}).data.tables == {"main": url}


WINDOW = {"by": "k", "make": {"n": "count()"}}


@pytest.mark.parametrize(
    ("key", "text", "changes"),
    [
        ("data.tables.a/b", "is not a valid table name", {"tables": {"a/b": "x.parquet"}}),
        ("data.tables...", "is not a valid table name", {"tables": {"..": "x.parquet"}}),
        ("features[0].columns", "no request column may be called 'score'", {"features": ["score"]}),
        ("features[0].columns", "may be called 'row'", {"features": ["a"], "derived": {"a": "row + 1"}}),
        ("features[0].columns", "may be called 'num__x'", {"features": ["num__x"]}),
        (
            "features[0].columns",
            "'x' makes the target",
            {"derived": {"z": "x"}, "target": {"expression": "z", "task": "binary"}},
        ),
        ("features[0].columns", "'a' is derived from 'y'", {"features": ["a"], "derived": {"a": "y + 1"}}),
        (
            "features[0].columns",
            "data.windows[0] has source: training_only; set that to request",
            {"features": ["n"], "time": "t", "windows": [WINDOW | {"source": "training_only"}]},
        ),
        ("data.derived", "'1 +'", {"derived": {"a": "1 +"}}),
        ("data.derived", "reads no column", {"derived": {"a": "1 + 2"}}),
        ("data.derived.a", "reads 'b' before it is made", {"derived": {"a": "b", "b": "a"}}),
        (
            "data.derived.n",
            "comes from 'windows[0]' too",
            {"derived": {"n": "x"}, "time": "t", "windows": [WINDOW]},
        ),
        ("data.where", "'n' is made by windows", {"where": "n > 1", "time": "t", "windows": [WINDOW]}),
        ("data.windows", "need data.time", {"windows": [WINDOW]}),
        ("data.windows[0]", "`rows` or `span`, not both", {"windows": [WINDOW | {"rows": 2, "span": "1d"}]}),
        (
            "data.windows[0].make",
            "'median(x)' is none of",
            {"windows": [{"by": "k", "make": {"n": "median(x)"}}]},
        ),
        ("data.windows[0].make", "names no column", {"windows": [{"by": "k", "make": {"n": "sum()"}}]}),
        ("data.windows[0].source", "request", {"windows": [WINDOW | {"source": "lookup"}]}),
        ("data.split", "needs `group: column`", {"split": {"kind": "group"}}),
        ("data.split.kind", "temporal needs data.time", {"split": {"kind": "temporal"}}),
        ("data.split.gap", "needs data.time", {"split": {"gap": "1d"}}),
        (
            "data.split.kind",
            "stratified needs classes",
            {"split": {"kind": "stratified"}, "target": {"expression": "y", "task": "regression"}},
        ),
        ("data.split", "`gap` has no meaning", {"split": {"kind": "random", "gap": "1d"}}),
        ("data.checks[0]", "min_rows is about the whole table", {"checks": [{"column": "x", "min_rows": 1}]}),
        ("data.checks[0]", "max needs a column", {"checks": [{"max": 1}]}),
        ("data.checks[0]", "a check needs", {"checks": [{"column": "x"}]}),
        ("data.checks[0]", "min is 3 and max is 2", {"checks": [{"column": "x", "min": 3, "max": 2}]}),
        ("data.checks[0]", "min_rows is 3 and max_rows is 2", {"checks": [{"min_rows": 3, "max_rows": 2}]}),
        (
            "data.joins[0]",
            "cannot be source: lookup",
            {"joins": [{"with": "r", "on": "k", "as_of": "t", "columns": ["c"], "source": "lookup"}]},
        ),
        ("data.joins[0]", "a join needs `on", {"joins": [{"with": "r", "columns": ["c"]}]}),
        (
            "data.joins[0].on",
            "made after the joins",
            {
                "tables": {"main": "m.csv", "r": "r.csv"},
                "derived": {"k": "x"},
                "joins": [{"with": "r", "on": "k", "columns": ["c"]}],
            },
        ),
    ],
)
def test_a_problem_is_reported_with_key_and_fix(key: str, text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        spec_with(**changes)
    assert any(found == key and text in said for found, said in caught.value.fields["problems"]), str(
        caught.value
    )


def test_all_problems_come_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        spec_with(features=["score"], tables={"a/b": "x"}, windows=[WINDOW], split={"gap": "1d"})
    assert len(caught.value.fields["problems"]) == 4


def test_what_a_request_holds_follows_derived_columns_and_lookups() -> None:
    data = spec_with(
        features=["c"],
        tables={"main": "m.csv", "side": "s.csv"},
        joins=[{"with": "side", "on": "k", "columns": ["size"], "source": "lookup"}],
        derived={"b": "x / size", "c": "b * z"},
    ).data
    assert data.request_columns("c") == ("x", "k", "z")
    assert [data.source_of(name) for name in ("x", "size", "c", "y")] == [
        "request",
        "lookup",
        "derived",
        "training_only",
    ]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("count()", WindowColumn("count", None)),
        ("lag( price , 3 )", WindowColumn("lag", "price", 3)),
        ("mean(`net price`)", WindowColumn("mean", "net price")),
    ],
)
def test_window_calls_are_read(call: str, expected: WindowColumn) -> None:
    assert window_column(call) == expected


def test_a_full_data_section_survives_the_way_to_yaml(tmp_path: Any) -> None:
    spec = spec_with(
        time="t",
        derived={"a": "x + 1"},
        where="a > 2",
        unique={"by": "k", "keep": "last"},
        windows=[WINDOW | {"span": "7d", "delay": "1h"}],
        split={"gap": "1d"},
        checks=[{"column": "x", "values": [1, 2], "otherwise": "warn"}],
        allow_leaks=["x"],
        id="k",
    )
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    assert load_spec(tmp_path / "spec.yaml") == spec


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"events": None}, "data.events", "name the column with an event's id"),
        ({"where": "x > 1"}, "data.where", "does not go with windows of source: online"),
        ({"unique": {"by": "id"}}, "data.unique", "does not go with windows of source: online"),
        ({"derived": {"k": "x + 1"}}, "data.windows[0]", "'k' is derived"),
        ({"training_only": ["k"]}, "data.windows[0]", "'k' is not known when a request is made"),
        ({"events": {"id": "at"}}, "data.events.id", "is a time"),
    ],
)
def test_windows_that_cannot_be_computed_while_a_model_is_served_are_refused_by_name(
    change: dict[str, Any], key: str, says: str
) -> None:
    section = {
        "tables": {"t": "t.parquet"},
        "time": "at",
        "target": {"expression": "y == 1", "task": "binary"},
        "events": {"id": "id"},
        "windows": [{"by": "k", "span": "1h", "source": "online", "make": {"n": "count()"}}],
    }
    assert not list(DataSpec.model_validate(section).problems())
    found = dict(DataSpec.model_validate({**section, **change}).problems())
    assert says in found[key]


def test_an_online_window_needs_a_span() -> None:
    with pytest.raises(ValueError, match="source: online needs `span`"):
        WindowSpec.model_validate({"by": "k", "rows": 3, "source": "online", "make": {"n": "count()"}})
