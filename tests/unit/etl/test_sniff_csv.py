"""What `serin init` finds out about a CSV file, and that the spec it writes reads the file."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.draft.guess import guess_spec
from serin.draft.sniff_csv import sniff_table
from serin.etl.sources.convert import convert
from serin.etl.sources.find import find_table
from serin.spec.load import load_spec

DAYS = ["31.12.2024", "2024-12-30", "01.02.2024"]


def lines(*rows: str, repeat: int = 30) -> str:
    """A header and rows that are repeated."""
    return "\n".join([rows[0], *(rows[1:] * repeat)]) + "\n"


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (lines("a,b", "1,x", "2,y").encode(), {}),
        (lines("a,b", "1,x", "2,y").encode("utf-8-sig"), {}),
        (lines("a;b", "1,5;x", "2;y").encode(), {"delimiter": ";", "decimal": ","}),
        (lines("a\tb", "1\tx, y", "2\tz").encode(), {"delimiter": "\t"}),
        (lines("a|b", "1|x", "2|y").encode(), {"delimiter": "|"}),
        (lines("a,b", '1,"x;y"', '2,"y;z;1"').encode(), {}),
        (lines("a;b", "1;'x;y'", "2;'it''s'").encode(), {"delimiter": ";", "quote": "'"}),
        (lines("a,b", '1,5" pipe', '2,6" pipe').encode(), {}),
        (lines("a,b", "1,é", "2,y").encode("latin-1"), {"encoding": "latin-1"}),
        (lines("a,b", "1,“é”", "2,y").encode("cp1252"), {"encoding": "cp1252"}),
        (lines("a,b", "1,é", "2,y").encode("utf-16"), {"encoding": "utf-16"}),
        (lines("a,b", "1,é", "2,y").encode("utf-16-le"), {"encoding": "utf-16-le"}),
        (lines("39, State", "50, Private").encode(), {"header": False, "names": ["column_1", "column_2"]}),
        (lines("region,2019,2020", "north,1,2", "south,3,4").encode(), {}),
        (lines("a;b", "1.234,5;x", "12;y").encode(), {"delimiter": ";", "decimal": ",", "thousands": "."}),
        (lines("a;b", "1.234;1,5", "12;2").encode(), {"delimiter": ";", "decimal": ",", "thousands": "."}),
        (lines("a,b", '"1,234,567.5",x', "12,y").encode(), {"thousands": ","}),
        (lines("a,b", "1,x", "None,y", "?,z").encode(), {"null_values": ["?", "None"]}),
        (lines("a,b", "k.A.,x", "k.A.,y", *(f"{row},z" for row in range(40))).encode(),
         {"null_values": ["k.A."]}),
        (lines("a,b", "1,k.A.", "2,k.A.", *(f"{row},{row}X" for row in range(40))).encode(), {}),
        (lines("a,b", "1,x", "NA,y", "3,z").encode(), {}),  # null beside numbers without being named
        (lines("a,city", "1,Köln", "2,NA", "3,None").encode(), {"null_values": ["NA", "None"]}),
        (lines("land,city", "NA,NA", "DE,Köln", "FR,Lyon").encode(), {"null_values": {"city": ["NA"]}}),
        (lines("a,b", *(f"{row},{day}" for row, day in enumerate(DAYS))).encode(),
         {"date_formats": {"b": ["%d.%m.%Y"]}}),
        (lines("a,b", "1,12/31/2024 10:30", "2,1/2/2024 9:05").encode(),
         {"date_formats": {"b": ["%m/%d/%Y %H:%M"]}}),
        (lines("a,b", "1,31/12/2024", "2,1/2/2024").encode(), {"date_formats": {"b": ["%d/%m/%Y"]}}),
        (lines("a,b", "1,03-Mar-2026 07:12 PM", "2,11-Dec-2025 12:00 AM").encode(),
         {"date_formats": {"b": ["%d-%b-%Y %I:%M %p"]}}),
        (lines("a,b", "1,24.08.1963 09:30 Uhr", "2,01.02.1999 23:59 Uhr").encode(),
         {"date_formats": {"b": ["%d.%m.%Y %H:%M Uhr"]}}),
        (lines("a,b", "1,3 March 2026 7:12:05pm", "2,14 december 2025 1:00:00AM").encode(),
         {"date_formats": {"b": ["%d %B %Y %I:%M:%S%p"]}}),
        (lines("a,b", "1,05/19/68", "2,12/31/01").encode(), {"date_formats": {"b": ["%m/%d/%y"]}}),
        (lines("a;b", "1,5;1.25", "2,5;3.5").encode(), {"delimiter": ";", "decimal": {"a": ","}}),
        (lines("a,b", "1,2024-12-31T10:00:00Z", "2,2024-12-31T10:00:00+01:00").encode(), {}),
        (lines("version,b", "1.2.3,x", "1.2.4,y").encode(), {}),
    ],
)  # fmt: skip
def test_what_a_file_is_like_is_found_and_reads_it(
    tmp_path: Path, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    found = sniff_table(str(tmp_path / "t.csv"))
    assert found.options == options
    assert len(found.seen) >= len(set(options) - {"names"})
    (file,) = find_table("main", found.source(str(tmp_path / "t.csv")))
    convert(file, tmp_path / "t.parquet")
    texts = [field.name for field in pq.read_schema(tmp_path / "t.parquet") if pa.types.is_string(field.type)]
    dates = options.get("date_formats", {})
    assert not set(texts) & {"a", *dates}


def test_a_written_spec_reads_the_file_and_says_what_was_seen(tmp_path: Path) -> None:
    rows = [f"{row};{row % 7},5;{DAYS[row % 3]};{['NA', 'Köln 🐤'][row % 2]};{row % 2}" for row in range(300)]
    (tmp_path / "t.txt").write_text("\n".join(["id;preis;tag;stadt;ziel", *rows]), encoding="utf-8-sig")
    text = guess_spec(tmp_path / "t.txt", "ziel", path_in_spec="t.txt")
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    for sentence in (
        "# the file starts with a byte order mark: UTF-8",
        "# fields are separated by semicolons",
        "# numbers have a decimal comma in preis, such as 0,5",
        "# read as null, also by the served model: 'NA' (150 cells) in stadt",
        "# tag holds 2 formats of dates, such as 31.12.2024 and 2024-12-30",
    ):
        assert sentence in text
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.data.time == "tag"
    assert spec.data.null_texts("main", "stadt") == ("NA",)


@pytest.mark.parametrize("name", ["t.parquet", "t"])
def test_other_formats_need_no_options(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / name)
    assert sniff_table(str(tmp_path / name)).options == {}
