import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serin.errors import RowsUnfit
from serin.formats.bundle import with_answers
from serin.formats.rows import read_rows, write_rows
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, OutputTensor, Schema, input_columns, outputs_of
from serin.formats.wire import to_wire

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
