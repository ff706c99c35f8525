"""What the ETL refuses: each error names the file or column and what to do, nothing is left in the store, and `check`
finds it before."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import (
    CheckFailed,
    ColumnClash,
    ColumnMissing,
    ColumnUnusable,
    JoinNotManyToOne,
    SerinError,
    SourceMissing,
    SourceUnreadable,
    SpecError,
    TableEmpty,
    TargetUnusable,
    TimeUnparsable,
)
from serin.etl.build import build_dataset
from serin.pipeline.check import check_spec
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

ROWS = 60
MAIN = {
    "id": [f"k{row % 7}" for row in range(ROWS)],
    "x": [float(row) for row in range(ROWS)],
    "when": [f"2024-01-{1 + row % 28:02d}T00:00:00" for row in range(ROWS)],
    "y": [row % 2 for row in range(ROWS)],
}
SIDE = {"id": [f"k{row}" for row in range(7)], "size": list(range(7)), "x": [0.5] * 7}


def spec_with(
    tmp_path: Path, *, main: Any = None, side: Any = None, feature: Any = None, **data: Any
) -> PipelineSpec:
    """A spec over the two tables above, with parts of them or of the spec replaced."""
    pq.write_table(pa.table(MAIN | (main or {})), tmp_path / "main.parquet")
    pq.write_table(pa.table(SIDE | (side or {})), tmp_path / "side.parquet")
    section = {
        "tables": {"main": str(tmp_path / "main.parquet"), "side": str(tmp_path / "side.parquet")},
        "joins": [{"with": "side", "on": "id", "columns": ["size"]}],
        "target": {"expression": "y == 1", "task": "binary"},
    }
    features = [feature or {"columns": ["x", "size"], "steps": ["fill_median", "normalize"]}]
    return load_spec({"name": "small", "data": section | data, "features": features})


def build(tmp_path: Path, **changes: Any) -> None:
    spec = spec_with(tmp_path, **changes)
    store = Store(str(tmp_path / "store"))
    try:
        build_dataset(spec.data, spec.features, EtlSpec(engine="process", workers=1), store=store)
    finally:
        places = [tmp_path / "store" / name for name in ("datasets", "keys", "work")]
        left = [
            path for place in places for path in place.rglob("*") if path.is_file() or place.name == "work"
        ]
        assert not left or (store.datasets() and not list((tmp_path / "store" / "work").iterdir()))


def test_the_tables_of_this_file_build(tmp_path: Path) -> None:
    build(tmp_path, time="when")


def refusal(kind: type[SerinError], text: str, **changes: Any) -> Any:
    return pytest.param(kind, text, changes, id=f"{kind.__name__}: {text}")


REFUSALS = [
    refusal(
        SourceMissing,
        "data.tables.main: nothing at .*gone.parquet",
        tables={"main": "/x/gone.parquet"},
        joins=[],
    ),
    refusal(SourceMissing, r"nothing at .*\*\.parquet", tables={"main": "/x/*.parquet"}, joins=[]),
    refusal(SourceUnreadable, "is not a complete Parquet file", tables={"main": __file__}, joins=[]),
    refusal(TableEmpty, "main.parquet holds none", main={name: pa.array([], pa.int64()) for name in MAIN}),
    refusal(TableEmpty, "60 rows without a target", main={"y": pa.nulls(ROWS, pa.int64())}),
    refusal(TableEmpty, r"60 rows that data\.where leaves out", where="x > 100"),
    refusal(
        TargetUnusable,
        "is 0 in every training row: there is nothing to learn",
        target={"expression": "y - y", "task": "regression"},
    ),
    refusal(
        TableEmpty,
        "60 rows without a partner",
        main={"id": ["z"] * ROWS},
        joins=[{"with": "side", "on": "id", "columns": ["size"], "how": "inner"}],
    ),
    refusal(TableEmpty, "split got none of 60 rows", split={"train": 0.98, "valid": 0.0199, "test": 0.0001}),
    refusal(
        ColumnMissing,
        "column 'sise' is not in 'main'; did you mean 'size'",
        feature={"columns": ["sise"], "steps": ["normalize"]},
    ),
    refusal(ColumnMissing, "data.target: column 'z'", target={"expression": "z > 1", "task": "binary"}),
    refusal(
        ColumnMissing,
        r"data.joins\[0\].columns: column 'sizes' is not in 'side'",
        joins=[{"with": "side", "on": "id", "columns": {"sizes": "size"}}],
    ),
    refusal(
        ColumnMissing,
        r"data.joins\[0\].on: column 'y' is not in 'side'",
        joins=[{"with": "side", "on": "y", "columns": ["size"]}],
    ),
    refusal(
        ColumnClash,
        "rename it in the join: columns: {x: side_x}",
        joins=[{"with": "side", "on": "id", "columns": ["size", "x"]}],
    ),
    refusal(
        JoinNotManyToOne,
        r"key \(id='k2'\) occurs 2 times in 'side'",
        side={"id": ["k0", "k1", "k2", "k3", "k4", "k2", "k6"]},
    ),
    refusal(
        ColumnUnusable,
        "key 'id' is a string in the main table, and 'id' is a int",
        side={"id": list(range(7))},
    ),
    refusal(
        ColumnUnusable,
        "'x' is a float in the main table",
        joins=[{"with": "side", "on": "x", "columns": ["size"]}],
    ),
    refusal(
        TimeUnparsable,
        "'when' does not parse as a time: 'soon' .row 3",
        main={"when": [*MAIN["when"][:3], "soon", *MAIN["when"][4:]]},
        time="when",
    ),
    refusal(SpecError, "'x' is a float; a time is", time="x"),
    refusal(
        TargetUnusable,
        "has one class only .true. in the training rows",
        target={"expression": "y < 5", "task": "binary"},
    ),
    refusal(
        TargetUnusable,
        "gives 2, and task: binary needs",
        target={"expression": "y + 2", "task": "binary"},
    ),
    refusal(
        TargetUnusable, "is text; for task regression", target={"expression": "id", "task": "regression"}
    ),
    refusal(
        TargetUnusable,
        "not floats",
        target={"expression": "x / 7", "task": "multiclass"},
        feature={"columns": ["size"], "steps": ["normalize"]},
    ),
    refusal(
        TargetUnusable, "cannot be computed: a string", target={"expression": "id > 3", "task": "binary"}
    ),
    refusal(
        CheckFailed,
        "'x' breaks max: 57: 2 of 60 rows; for example 58 in row 58",
        checks=[{"column": "x", "max": 57}],
    ),
    refusal(
        CheckFailed,
        "30 of 60 rows are null",
        checks=[{"column": "y", "max_nulls": 0.4}],
        main={"y": [None if row < 30 else row % 2 for row in range(ROWS)]},
    ),
    refusal(SpecError, "'id' is a string; min and max need a number", checks=[{"column": "id", "min": 1}]),
    refusal(
        SpecError,
        "categorify needs strings or integers",
        feature={"columns": ["x"], "steps": ["categorify"]},
    ),
    refusal(ColumnUnusable, "has type list", main={"x": [[1]] * ROWS}),
    refusal(
        ColumnUnusable,
        "'x' has no value",
        main={"x": pa.nulls(ROWS, pa.float64())},
    ),
    refusal(
        SpecError,
        "data.where: .*a string is compared",
        where="x > 'a'",
    ),
    refusal(
        SpecError,
        "data.derived.z: .*strings have no arithmetic",
        derived={"z": "id * 2"},
        feature={"columns": ["z"], "steps": ["normalize"]},
    ),
    refusal(SpecError, "has a column 'when' already", derived={"when": "x > 2"}),
    refusal(SpecError, "data.id: 'x' is a float", id="x"),
    refusal(SpecError, "data.split.group: 'x' is a float", split={"group": "x"}),
    refusal(SpecError, "data.unique.by: 'x' is a float", unique={"by": "x"}),
    refusal(ColumnMissing, "data.split.group: column 'xs'", split={"group": "xs"}),
    refusal(ColumnMissing, "data.allow_leaks: column 'xs'", allow_leaks=["xs"]),
    refusal(
        SpecError,
        "sum needs numbers, and 'id' is text",
        time="when",
        windows=[{"by": "id", "make": {"past": "sum(id)"}}],
        feature={"columns": ["past"], "steps": ["fill_median"]},
    ),
    refusal(
        SpecError,
        r"data.windows\[0\].by: 'x' is a float, which cannot be a key",
        time="when",
        windows=[{"by": "x", "make": {"past": "count()"}}],
        feature={"columns": ["past"], "steps": ["fill_median"]},
    ),
    refusal(
        SpecError,
        "data.derived.z: is a feature, but .* goes by the order of texts",
        derived={"z": "id > 'k2'"},
        feature={"columns": ["z"], "steps": ["categorify"]},
    ),
    refusal(SpecError, "newest_within needs a time", checks=[{"column": "id", "newest_within": "1d"}]),
    refusal(SpecError, "values must be all strings or all integers", checks=[{"column": "x", "values": [1]}]),
    refusal(CheckFailed, "breaks type: int: it is a float", checks=[{"column": "x", "type": "int"}]),
    refusal(CheckFailed, "breaks min_rows", checks=[{"min_rows": 61}]),
    refusal(
        ColumnUnusable,
        "key 'x' is a float",
        joins=[{"with": "side", "on": "id", "as_of": "x", "columns": ["size"]}],
    ),
]
_ONLY_A_BUILD = "split got none"


@pytest.mark.parametrize(("kind", "text", "changes"), REFUSALS)
def test_a_refusal_names_the_place_and_what_to_do(
    tmp_path: Path, kind: type[SerinError], text: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=text) as caught:
        build(tmp_path, **changes)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("kind", "text", "changes"), [each for each in REFUSALS if _ONLY_A_BUILD not in str(each.id)]
)
def test_check_finds_what_a_build_would_refuse_as_a_problem_of_the_spec(
    tmp_path: Path,
    home: Path,
    kind: type[SerinError],
    text: str,
    changes: dict[str, Any],
) -> None:
    with pytest.raises(SpecError, match=text.replace("data.checks: ", "")) as caught:
        check_spec(spec_with(tmp_path, **changes))
    assert len(caught.value.fields["problems"]) == 1, kind


def test_a_bound_is_as_precise_as_its_column(tmp_path: Path) -> None:
    build(
        tmp_path,
        main={"x": pa.array([0.1] * 30 + [0.2] * 30)},
        checks=[{"column": "x", "min": 0.1, "max": 0.2}],
    )
