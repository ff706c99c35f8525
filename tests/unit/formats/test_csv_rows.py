"""Rows to be scored may be written like the training table: the bundle's spec says how that was."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from serin.errors import RowsUnfit
from serin.formats.rows import read_rows, write_rows
from serin.formats.schema import DTYPE_OF_KIND, NULL_OF_KIND, InputColumn, Kind, Schema, outputs_of
from serin.formats.wire import to_wire
from serin.spec.load import load_spec

OPTIONS: dict[str, Any] = {
    "delimiter": ";", "decimal": ",", "thousands": ".", "encoding": "latin-1", "null_values": ["NA"],
    "date_formats": {"tag": ["%d.%m.%Y"]},
}  # fmt: skip


def column(name: str, kind: Kind) -> InputColumn:
    return InputColumn(name=name, dtype=DTYPE_OF_KIND[kind], kind=kind, null=NULL_OF_KIND[kind])


SCHEMA = Schema(
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
    return dict(pa.concat_tables(read_rows(path, SCHEMA, folder)).to_pydict())


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
    assert to_wire(next(read_rows(tmp_path / "rows.csv", SCHEMA, folder)), SCHEMA)["tag"][0, 0] > 0
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
