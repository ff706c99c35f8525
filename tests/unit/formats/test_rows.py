"""Rows to be scored: whatever carries them, and integers exactly or not at all."""

import json
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.errors import RowsUnfit
from serin.formats.bundle import with_answers
from serin.formats.rows import read_rows, write_rows
from serin.formats.schema import (
    DTYPE_OF_KIND,
    INT64_NULL,
    NULL_OF_KIND,
    InputColumn,
    Kind,
    OutputTensor,
    Schema,
    input_columns,
    outputs_of,
)
from serin.formats.wire import as_arrow, to_wire
from serin.serving.client.client import _table
from serin.spec.load import load_spec

SCHEMA = Schema(
    task="binary",
    inputs=input_columns([{"name": f"a_{k}", "kind": k, "dtype": d} for k, d in DTYPE_OF_KIND.items()]),
    outputs=outputs_of("binary"),
)
TABLE = pa.table(
    {
        "id": ["7", "8"],
        "a_string": ["0123", ""],
        "a_float": [1.5, None],
        "a_int": [3, None],
        "a_timestamp": ["2013-01-31T05:00:00", None],
        "a_bool": [True, None],
    }
)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_rows_survive_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    with write_rows(path) as writer:
        writer.write_table(TABLE)
        writer.write_table(TABLE)
    found = pa.concat_tables(read_rows(path, SCHEMA))
    assert found.column("id").to_pylist() == ["7", "8"] * 2
    wire = to_wire(found, SCHEMA)
    assert wire["a_string"][:, 0].tolist() == ["0123", ""] * 2
    assert wire["a_int"][:, 0].tolist() == [3, INT64_NULL] * 2
    for name, values in to_wire(pa.concat_tables([TABLE, TABLE]), SCHEMA).items():
        np.testing.assert_array_equal(wire[name], values, strict=True)


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(RowsUnfit, match="cannot be written"), write_rows(path) as writer:
        writer.write_table(TABLE)
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_named_elements_become_columns_in_csv(tmp_path: Path) -> None:
    schema = Schema(
        task="regression",
        inputs=(),
        outputs=(OutputTensor(name="score", dtype="FP32", dims=(2,)),),
        targets=("sbp", "dbp"),
    )
    scores = np.array([[120.5, 80.0], [99.0, 61.5]], np.float32)
    answered = with_answers(pa.table({"row": [1, 2]}), {"score": scores}, schema)
    with write_rows(tmp_path / "a.csv") as writer:
        writer.write_table(answered)
    assert (tmp_path / "a.csv").read_text() == '"row","score_sbp","score_dbp"\n1,120.5,80\n2,99,61.5\n'


def test_a_label_becomes_its_class_in_csv(tmp_path: Path) -> None:
    schema = Schema(
        task="multiclass", inputs=(), outputs=outputs_of("multiclass", 2), classes=("Adelie", "Gentoo")
    )
    answers = {"label": np.array([[1], [0]]), "probabilities": np.array([[0.25, 0.75], [1, 0]], np.float32)}
    with write_rows(tmp_path / "a.csv") as writer:
        writer.write_table(with_answers(pa.table({"row": [1, 2]}), answers, schema))
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        '"row","label","probabilities_Adelie","probabilities_Gentoo"', '1,"Gentoo",0.25,0.75', '2,"Adelie",1,0'
    ]  # fmt: skip


def test_probabilities_become_text_in_csv_and_nan_becomes_null_in_json(tmp_path: Path) -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array([0.25, 0.75], pa.float32()), 2)
    with write_rows(tmp_path / "a.csv") as writer:
        writer.write_table(pa.table({"p": lists}))
    assert (tmp_path / "a.csv").read_text() == '"p"\n"[0.25, 0.75]"\n'
    with write_rows(tmp_path / "a.jsonl") as writer:
        writer.write_table(pa.table({"x": [float("nan"), 1.0]}))
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        {"x": None},
        {"x": 1.0},
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.parquet", None, "No such file"),
        ("rows.xlsx", b"", "use .parquet, .csv or .jsonl"),
        ("rows.parquet", b"not parquet", "cannot be read"),
        ("rows.csv", b"a_int,a_float\n1,2\nx,3\n", "conversion error to int64"),
        ("rows.csv", b"", "cannot be read"),
        ("rows.jsonl", b"\xff\xfe{}", "cannot be read"),
        ("rows.jsonl", b'{"a_string": 1}\n', "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RowsUnfit, match=reason):
        list(read_rows(path, SCHEMA))


def test_a_column_that_json_rows_lack_is_missing_and_not_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a_int": 1}\n')
    (table,) = read_rows(path, SCHEMA)
    assert table.column_names == ["a_int"]


def test_a_result_of_no_known_kind_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(RowsUnfit, match=r"use \.parquet"), write_rows(tmp_path / "out.txt"):
        raise AssertionError


def test_null_words_are_text_in_columns_of_text_and_null_in_all_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = [("NA", "2013-01-31T05:00:00"), ("nan", "NA"), ("", ""), ("N/A", "null")]
    lines = ["a_string,a_float,a_int,a_timestamp,a_bool,other"]
    lines += [f"{word},{word},{word},{time},{word},{word}" for word, time in cells]
    path.write_text("\n".join(lines) + "\n")
    (table,) = read_rows(path, SCHEMA)
    wire = {name: values[:, 0].tolist() for name, values in to_wire(table, SCHEMA).items()}
    assert wire["a_string"] == table.column("other").to_pylist() == ["NA", "nan", "", "N/A"]
    assert wire["a_int"] == [INT64_NULL] * 4
    assert wire["a_timestamp"] == [1_359_608_400_000_000, INT64_NULL, INT64_NULL, INT64_NULL]
    assert wire["a_bool"] == [-1] * 4
    assert np.isnan(wire["a_float"]).all()


def test_json_rows_have_the_models_types_even_where_the_first_row_lacks_a_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"a_int": None}, {"a_int": 1}, {"a_int": 2, "a_string": "2024-01-01", "a_float": 3}]
    path.write_text("\ufeff" + "\n".join(json.dumps(row) for row in rows))
    (table,) = read_rows(path, SCHEMA)
    assert table.schema.field("a_string").type == pa.string()
    assert table.select(["a_int", "a_string", "a_float"]).to_pylist() == [
        {"a_int": None, "a_string": None, "a_float": None},
        {"a_int": 1, "a_string": None, "a_float": None},
        {"a_int": 2, "a_string": "2024-01-01", "a_float": 3.0},
    ]


def test_a_value_may_hold_line_ends_wherever_in_a_file_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.formats.rows._BLOCK_BYTES", 100)
    path = tmp_path / "rows.csv"
    path.write_text("a_string,a_int\n" + "".join(f'"x\n,{n}",{n}\n' for n in range(99)))
    found = pa.concat_tables(read_rows(path, SCHEMA))
    assert found.column("a_string").to_pylist() == [f"x\n,{n}" for n in range(99)]


OPTIONS: dict[str, Any] = {
    "delimiter": ";", "decimal": ",", "thousands": ".", "encoding": "latin-1", "null_values": ["NA"],
    "date_formats": {"tag": ["%d.%m.%Y"]},
}  # fmt: skip


def column(name: str, kind: Kind) -> InputColumn:
    return InputColumn(name=name, dtype=DTYPE_OF_KIND[kind], kind=kind, null=NULL_OF_KIND[kind])


CSV_SCHEMA = Schema(
    task="binary",
    inputs=(
        column("preis", "float"), column("id", "int"), column("tag", "timestamp"), column("ort", "string"),
        column("neu", "bool"),
    ),
    outputs=outputs_of("binary"),
)  # fmt: skip


def bundle(folder: Path, table: object, **data: Any) -> Path:
    section = {"tables": {"main": table}, "target": {"expression": "ziel", "task": "binary"}, **data}
    features = [{"columns": ["preis"], "steps": ["normalize"]}]
    spec = load_spec({"name": "preise", "data": section, "features": features})
    (folder / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    return folder


def read(path: Path, folder: Path) -> dict[str, list[Any]]:
    return dict(pa.concat_tables(read_rows(path, CSV_SCHEMA, folder)).to_pydict())


WANTED = {
    "preis": [1234.5, None],
    "id": [2**53 + 1, 7],
    "tag": [datetime(2024, 12, 31), datetime(2024, 1, 2)],  # noqa: DTZ001 (times without a zone)
    "ort": ["Köln", None],
    "neu": [True, None],
    "rest": ["1,5", "NA"],
}


def test_rows_are_read_like_the_training_table(tmp_path: Path) -> None:
    folder = bundle(tmp_path, {"path": "/t.csv", **OPTIONS})
    text = "preis;id;tag;ort;neu;rest\n1.234,5;9007199254740993;31.12.2024;Köln;1;1,5\nNA;7;2024-01-02;NA;NA;NA\n"
    (tmp_path / "rows.csv").write_text(text, encoding="latin-1")
    assert read(tmp_path / "rows.csv", folder) == WANTED
    assert to_wire(next(read_rows(tmp_path / "rows.csv", CSV_SCHEMA, folder)), CSV_SCHEMA)["tag"][0, 0] > 0
    (tmp_path / "rows.csv").write_text(text.replace("1.234,5", "12.34,5"), encoding="latin-1")
    with pytest.raises(RowsUnfit, match=r"column 'preis'.* holds a cell that is not float"):
        read(tmp_path / "rows.csv", folder)


def test_plain_rows_are_read_as_plain_csv(tmp_path: Path) -> None:
    folder = bundle(tmp_path, {"path": "/t.csv", **OPTIONS})
    text = "preis,id,tag,ort,neu\n1234.5,9007199254740993,2024-12-31,Köln,1\n"
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    found = read(tmp_path / "rows.csv", folder)
    assert (found["preis"], found["id"], found["ort"]) == ([1234.5], [2**53 + 1], ["Köln"])
    assert read(tmp_path / "rows.csv", bundle(tmp_path, "/t.csv")) == found


def test_names_that_the_spec_gives_are_the_names_of_the_rows(tmp_path: Path) -> None:
    names = ["preis", "nummer", "tag", "ort", "neu", "rest"]
    table = {"path": "/t.csv", **OPTIONS, "header": False, "names": names}
    folder = bundle(tmp_path, table, rename={"main": {"nummer": "id"}})
    text = "1.234,5;9007199254740993;31.12.2024;Köln;1;1,5\nNA;7;02.01.2024;NA;NA;NA\n"
    (tmp_path / "rows.csv").write_text(text, encoding="latin-1")
    assert read(tmp_path / "rows.csv", folder) == WANTED


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_rows_of_the_training_table_are_found_under_its_own_names(tmp_path: Path, form: str) -> None:
    """`preis` is called `score` in the table; a file with the new name is read as it is."""
    folder = bundle(tmp_path, "/t.parquet", rename={"main": {"score": "preis"}})
    rows = pa.table({"score": [1.5, None], "id": [1, 2], "tag": ["2024-01-02", None], "ort": ["Ulm", ""],
                     "neu": [True, None]})  # fmt: skip
    for name in ("score", "preis"):
        path, written = tmp_path / f"{name}.{form}", rows.rename_columns([name, *rows.column_names[1:]])
        with write_rows(path) as writer:
            writer.write_table(written)
        found = read(path, folder)
        assert (found["preis"], found["id"]) == ([1.5, None], [1, 2])
        assert "score" not in found


INTEGER_SCHEMA = Schema(
    task="binary",
    inputs=input_columns([{"name": "id", "kind": "int", "dtype": "INT64"}]),
    outputs=outputs_of("binary"),
)
Ids = list[int | None]
ids = st.lists(
    st.one_of(
        st.none(),
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.integers(2**53 - 3, 2**53 + 3),
        st.integers(-(2**53) - 3, -(2**53) + 3),
        st.integers(2**24 - 3, 2**24 + 3),
        st.integers(-9, 9),
    ),
    min_size=1,
    max_size=8,
)


def from_file(suffix: str) -> Callable[[Ids, Path], Any]:
    def carry(values: Ids, folder: Path) -> pa.Table:
        path, frame = folder / f"rows{suffix}", pd.DataFrame({"id": values, "n": range(len(values))})
        match suffix:
            case ".csv":
                lines = "".join(f"{'NA' if value is None else value},0\n" for value in values)
                path.write_text(f"id,n\n{lines}")
            case ".jsonl":
                path.write_text("".join(json.dumps({"id": value}) + "\n" for value in values))
            case _:
                frame.to_parquet(path)
        return pa.concat_tables(read_rows(path, INTEGER_SCHEMA))

    return carry


def narrow(values: Ids, kind: str) -> pd.DataFrame:
    numbers = [np.nan if value is None else value for value in values]
    return pd.DataFrame({"id": np.asarray(numbers, kind)})


EXACT: dict[str, Callable[[Ids, Path], Any]] = {
    "nullable frame": lambda values, _: pd.DataFrame({"id": pd.array(values, "Int64")}),
    "arrow frame": lambda values, _: pd.DataFrame({"id": pd.array(values, "int64[pyarrow]")}),
    "object frame": lambda values, _: pd.DataFrame({"id": pd.Series(values, dtype=object)}),
    "table": lambda values, _: pa.table({"id": pa.array(values, pa.int64())}),
    "dicts": lambda values, _: [{"id": values[0]}, *({"id": n} if n is not None else {} for n in values[1:])],
    "columns": lambda values, _: {"id": values},
    "csv": from_file(".csv"),
    "json": from_file(".jsonl"),
}
BENDING: dict[str, Callable[[Ids, Path], Any]] = {
    "frame": lambda values, _: pd.DataFrame({"id": values}),
    "float64": lambda values, _: narrow(values, "float64"),
    "float32": lambda values, _: narrow(values, "float32"),
    "float16": lambda values, _: narrow(values, "float16"),
    "parquet by pandas": from_file(".parquet"),
}


@settings(max_examples=30, deadline=None)
@given(ids)
@example([2**53 + 1, None])
@example([-(2**53) - 1, None])
@example([2**24 + 1, None])
@example([None, None])
def test_integers_are_carried_exactly_or_refused(values: Ids) -> None:
    wanted = [INT64_NULL if value is None else value for value in values]
    with tempfile.TemporaryDirectory() as scratch:
        for name, carry in (EXACT | BENDING).items():
            with np.errstate(over="ignore"):
                given_rows = carry(values, Path(scratch))
            refusals = RowsUnfit if name in BENDING else ()
            try:
                found = to_wire(as_arrow(_table(given_rows)), INTEGER_SCHEMA)["id"][:, 0].tolist()
            except refusals as error:
                refusal = str(error)
            else:
                refusal = ""
                assert found == wanted, name
            assert not refusal or "Int64" in refusal


@pytest.mark.parametrize("largest", [2**53 - 1, -(2**53) + 1])
def test_floats_that_no_other_integer_could_have_become_are_taken(largest: int) -> None:
    frame = pd.DataFrame({"id": [largest, None]})
    assert to_wire(frame, INTEGER_SCHEMA)["id"][:, 0].tolist() == [largest, INT64_NULL]
