"""Files that cannot be read: what is said names the file as the user knows it, and the row where there is one."""

import gzip
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import SerinError, SourceUnreadable, SpecError, TimeUnparsable
from serin.etl.sources.convert import convert
from serin.etl.sources.files import find_files
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of, trips

LINES = [f"{row},{row % 7}.5,word {row}" for row in range(2000)]


def refused(path: Path, tmp_path: Path, **data: object) -> str:
    """What a build of this table says; and it publishes nothing."""
    spec = spec_of(tmp_path, tables={"trips": str(path)}, **data)
    store = Store(str(tmp_path / "store"))
    with pytest.raises(SerinError) as caught:
        build(spec, store)
    assert store.datasets() == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"", "t.csv cannot be read: it is empty"),
        ("t.csv", b"\n\n", "t.csv cannot be read: it is empty"),
        ("t.csv", b"a,b,a\n1,2,3\n", "t.csv cannot be read: two columns are called 'a'"),
        ("t.csv", "\n".join(["a,b,c", *LINES[:900]]).encode() + b"\n1,2,\xff\n",
         "t.csv cannot be read: line 902 is not valid UTF-8 text"),
        ("t.csv", b'a,b\n1,x\n2,"oh\n3,y\n', "a quote is opened in row 1 (line 3) and not closed"),
        ("t.json", b'[\n {"a": 1},\n {"a": 2}\n]', "t.json cannot be read: it is one JSON array"),
        ("t.jsonl", b"", "t.jsonl holds none"),
        ("t.arrow", b"", "t.arrow cannot be read"),
        ("t.parquet", b"", "t.parquet cannot be read: it is not a complete Parquet file"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name, tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    assert "it is not a regular file" in refused(tmp_path / "t.csv", tmp_path)


@pytest.mark.parametrize("content", ["{long}\n1\n", "a\n{long}\n", 'a,b\n1,"{long}"\n2,"x""y"\n'])
def test_a_field_of_a_megabyte_is_a_value_like_others(tmp_path: Path, content: str) -> None:
    long = "x" * 2**20
    (tmp_path / "t.csv").write_text(content.format(long=long))
    convert(find_files("t", str(tmp_path / "t.csv"))[0], tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet").to_pydict()
    assert long in [*table, *(value for values in table.values() for value in values)]


def test_a_field_beyond_every_bound_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('a,b\n1,x\n2,"' + "y" * (17 * 2**20) + '"\n1,2,3\n')
    with pytest.raises(SourceUnreadable, match=r"t\.csv cannot be read: the row after line 2 cannot be read"):
        convert(find_files("t", str(tmp_path / "t.csv"))[0], tmp_path / "t.parquet")


def test_a_quote_inside_of_a_value_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'a,b\n1,5" pipe\n2,"6"" pipe"\n')
    convert(find_files("t", str(tmp_path / "t.csv"))[0], tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet").column("b").to_pylist() == ['5" pipe', '6" pipe']


def test_a_packed_file_with_a_wrong_byte_is_called_corrupt_and_no_line_is_blamed(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress("\n".join(["a,b,c", *LINES]).encode()))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "t.csv.gz").write_bytes(bytes(packed))
    assert "t.csv.gz cannot be read: the gzip is corrupt" in refused(tmp_path / "t.csv.gz", tmp_path)


def test_a_parquet_page_with_a_wrong_checksum_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"fare": np.random.default_rng(1).normal(size=4000), "tip": np.arange(4000.0)})
    pq.write_table(
        table, path, row_group_size=1000, use_dictionary=False, write_page_checksum=True, compression="none"
    )
    offset = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[offset + 500] ^= 1  # a number like another
    path.write_bytes(bytes(content))
    spec = spec_of(tmp_path, tables={"trips": str(path)}, time=None)
    with pytest.raises(SourceUnreadable, match=r"t\.parquet cannot be read: rows .*checksum"):
        build(spec, Store(str(tmp_path / "store")), piece_rows=1000)


def test_the_value_that_makes_a_text_of_numbers_is_named(tmp_path: Path) -> None:
    frame = trips()
    frame["fare"] = frame["fare"].astype(str)
    frame.loc[700, "fare"] = "about 5"
    frame.to_csv(tmp_path / "t.csv", index=False)
    spec = spec_of(tmp_path, tables={"trips": str(tmp_path / "t.csv")})
    says = r"row 700 of .*t\.csv holds 'about 5', which is not a number; if it means null, .*\.trips\.null_values"
    with pytest.raises(SpecError, match=says):
        build(spec, Store(str(tmp_path / "store")))


def test_numbers_with_a_decimal_comma_are_recognised(tmp_path: Path) -> None:
    trips().to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",")
    spec = spec_of(tmp_path, tables={"trips": {"path": str(tmp_path / "t.csv"), "delimiter": ";"}}, time=None)
    with pytest.raises(
        SpecError, match=r"its numbers have a decimal comma; set data\.tables\.trips\.decimal"
    ):
        build(spec, Store(str(tmp_path / "store")))


def test_a_type_that_changes_between_files_is_named_with_its_row(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    trips().to_csv(folder / "1.csv", index=False)
    frame = trips().astype({"people": object})
    frame.loc[31, "people"] = "two"
    frame.to_csv(folder / "2.csv", index=False)
    assert (
        "2.csv cannot be read: column 'people' is string here and int64 in the files before (row 31"
        in refused(folder, tmp_path)
    )


def test_a_time_that_does_not_parse_is_named_by_the_file_it_came_in(tmp_path: Path) -> None:
    frame: pd.DataFrame = trips().astype({"start": str})
    frame.loc[5, "start"] = "yesterday"
    frame.to_csv(tmp_path / "t.csv", index=False)
    spec = spec_of(tmp_path, tables={"trips": str(tmp_path / "t.csv")})
    with pytest.raises(TimeUnparsable, match=r"'yesterday' \(row 5 of the table, in .*t\.csv\)"):
        build(spec, Store(str(tmp_path / "store")))
