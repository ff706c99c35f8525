"""Every form a table may come in, and what is said about one that cannot be read."""

import gzip
import json
import os
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from serin.errors import SerinError, SourceUnreadable, SpecError, TimeUnparsable
from serin.etl.build import build_dataset
from serin.etl.identity import current_key
from serin.etl.sources.convert import convert
from serin.etl.sources.files import find_files
from serin.etl.sources.tables import Read, Table, cut, open_table, read_piece
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.spec.etl import EtlSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import build, spec_of, table_spec, trips

ROWS = [{"city": f"c{row % 5}", "size": row if row % 7 else None, "price": row / 4} for row in range(300)]
TABLE = pa.Table.from_pylist(ROWS)
LINES = "".join(
    json.dumps({key: value for key, value in row.items() if value is not None}) + "\n" for row in ROWS
)


def opened(path: Path, scratch: Path) -> Table:
    return open_table("t", find_files("t", str(path)), scratch)


def values(table: Table, *columns: str) -> list[list[object]]:
    kinds = {"city": "string", "size": "int", "price": "float", "year": "int", "place": "string"}
    reads = [Read(column=name, kind=kinds[name]) for name in columns]  # type: ignore[arg-type]
    found: list[list[object]] = [[] for _ in columns]
    for piece in cut(table, 100):
        made = read_piece(piece, reads)
        for own, name in zip(found, columns, strict=True):
            own += made[name].to_arrow().to_pylist()
    return found


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if ".csv" in name:
        pa_csv.write_csv(TABLE, folder / "plain")
        content = (folder / "plain").read_bytes()
    elif "json" in name:
        content = LINES.encode()
    elif name.endswith((".arrow", ".feather")):
        feather.write_feather(TABLE, str(path), compression="zstd", chunksize=70)
        return path
    else:
        with pa.ipc.new_stream(str(path), TABLE.schema) as stream:
            stream.write_table(TABLE, max_chunksize=70)
        return path
    if name.endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as packed:
            packed.write(content)
        return path
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "t.csv",
        "t.csv.gz",
        "t.csv.zst",
        "t.jsonl",
        "t.ndjson.gz",
        "t.json.zst",
        "t.arrow",
        "t.feather",
        "t.arrows",
    ],
)
def test_a_table_is_the_same_in_every_form(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.etl.sources.convert._BLOCK_BYTES", 1000)
    expected = [TABLE.column(column).to_pylist() for column in ("city", "size", "price")]
    assert values(opened(write(tmp_path, name), tmp_path), "city", "size", "price") == expected


def test_folders_named_key_value_are_columns(tmp_path: Path) -> None:
    for year, place in ((2023, "north"), (2024, "south%20west"), (2024, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "t" / f"year={year}" / f"place={place}"
        folder.mkdir(parents=True)
        pq.write_table(TABLE.slice(0, 2), folder / "part.parquet")
    (tmp_path / "t" / "_temporary").mkdir()
    pq.write_table(pa.table({"other": [1]}), tmp_path / "t" / "_temporary" / "half.parquet")
    expected = [[2023, 2023, 2024, 2024, 2024, 2024], ["north"] * 2 + [None] * 2 + ["south west"] * 2]
    assert values(opened(tmp_path / "t", tmp_path), "year", "place") == expected
    assert values(opened(tmp_path / "t" / "*" / "*" / "*.parquet", tmp_path), "year", "place") == expected


def test_json_types_hold_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serin.etl.sources.convert._BLOCK_BYTES", 200)
    lines = ['{"a": 1, "t": "2024-01-01"}'] * 50 + ['{"a": 1.5, "t": "soon", "late": true}'] * 2
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    table = opened(tmp_path / "t.jsonl", tmp_path)
    assert {name: str(kind) for name, kind in table.types.items()} == {
        "a": "double",
        "t": "string",
        "late": "bool",
    }
    assert table.rows == 52


def corrupt(path: Path, at: int, byte: int = 0xFF) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= byte
    path.write_bytes(bytes(content))


def test_a_broken_csv_line_is_named(tmp_path: Path) -> None:
    lines = ["a,b", *(f"{row},{row}" for row in range(5000)), "7,8,9", "1,2"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(SourceUnreadable, match=r"t\.csv.*line 5002 has 3 fields.*'7,8,9'"):
        opened(tmp_path / "t.csv", tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"city": ', r"row 300 \(line 301\) is not JSON"),
        ("[1, 2]", r"row 300 \(line 301\) is a list"),
        ('{"size": "many"}', r"column 'size' is string in row 300 and number before"),
    ],
)
def test_a_broken_json_line_is_named_by_row(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(LINES + line + "\n" + LINES)
    with pytest.raises(SourceUnreadable, match=rf"t\.jsonl cannot be read: {says}"):
        opened(tmp_path / "t.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("name", "form"), [("t.csv.gz", "gzip"), ("t.jsonl.gz", "gzip"), ("t.csv.zst", "zstd")]
)
def test_a_corrupt_or_cut_file_is_named_with_the_line_it_reaches(
    tmp_path: Path, name: str, form: str
) -> None:
    path = write(tmp_path, name)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    says = rf"{name} cannot be read: the {form} is corrupt or cut off after about line"
    with pytest.raises(SourceUnreadable, match=says):
        opened(path, tmp_path)
    if form == "zstd":
        return
    path.write_bytes(whole)
    corrupt(path, len(whole) - 6)  # the checksum
    with pytest.raises(SourceUnreadable, match="the gzip is corrupt"):
        opened(path, tmp_path)


def test_a_parquet_file_broken_inside_is_named_with_its_rows(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet", compression="gzip", row_group_size=100)
    start = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(1).column(2).data_page_offset
    for at in range(start, start + 60):
        corrupt(tmp_path / "t.parquet", at)
    with pytest.raises(SourceUnreadable, match=r"t\.parquet cannot be read: rows 100 to 199"):
        values(opened(tmp_path / "t.parquet", tmp_path), "price")


def test_files_with_other_columns_are_refused_by_column(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "1.parquet")
    pq.write_table(TABLE.drop_columns(["size"]), tmp_path / "2.parquet")
    with pytest.raises(SourceUnreadable, match=r"column 'size' is in .*1\.parquet and not in .*2\.parquet"):
        opened(tmp_path / "*.parquet", tmp_path)


BROKEN_LINES = [f"{row},{row % 7}.5,word {row}" for row in range(2000)]


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
        ("t.csv", "\n".join(["a,b,c", *BROKEN_LINES[:900]]).encode() + b"\n1,2,\xff\n",
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
    packed = bytearray(gzip.compress("\n".join(["a,b,c", *BROKEN_LINES]).encode()))
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


SMALL_TABLE = pa.table(
    {
        "city": ["a", "b", None, "c"] * 50,
        "size": [1, None, 3, 4] * 50,
        "price": [0.25, 1.5, None, -2.0] * 50,
        "sold": [row % 3 == 0 for row in range(200)],
    }
)


def spec_for(path: str) -> PipelineSpec:
    numbers = {"columns": ["size", "price"], "steps": ["fill_median", "normalize"]}
    return table_spec(path, "sold", numbers, {"columns": ["city"], "steps": ["categorify"]})


def features_from(path: str, store: Store) -> tuple[bytes, bytes]:
    spec = spec_for(path)
    dataset = build_dataset(spec.data, spec.features, EtlSpec(), store=store)
    train = read_split(dataset.path, "train").whole()
    return train.num.tobytes(), train.cat.tobytes()


def test_every_place_of_a_table_gives_the_same_features(tmp_path: Path, store: Store) -> None:
    pq.write_table(SMALL_TABLE, tmp_path / "one.parquet", row_group_size=70)
    expected = features_from(str(tmp_path / "one.parquet"), store)
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(SMALL_TABLE.slice(0, 90), parts / "a.parquet")
    pq.write_table(SMALL_TABLE.slice(90), parts / "b.parquet")
    (parts / "_SUCCESS").touch()
    with fsspec.open("memory://cities/one.parquet", "wb") as file:
        pq.write_table(SMALL_TABLE, file)
    for path in (str(parts), f"{parts}/*.parquet", "memory://cities/one.parquet"):
        assert features_from(path, store) == expected, path


def test_a_dataset_is_computed_once_until_a_file_changes(tmp_path: Path, store: Store) -> None:
    file = tmp_path / "one.parquet"
    pq.write_table(SMALL_TABLE, file)
    spec = spec_for(str(file))
    lines: list[str] = []
    first = build_dataset(spec.data, spec.features, EtlSpec(), store=store)
    with heard(lines.append):
        again = build_dataset(spec.data, spec.features, EtlSpec(engine="process", workers=1), store=store)
    assert again == first
    assert "there already" in lines[0]
    assert read_dataset(first.path).digest == first.digest
    key = current_key(spec.data, spec.features, store)
    pq.write_table(SMALL_TABLE.slice(1), file)
    assert current_key(spec.data, spec.features, store) != key


def test_pieces_cover_the_table_in_order_and_never_cut_a_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "1.parquet", row_group_size=30)
    table = opened(tmp_path / "1.parquet", tmp_path)
    assert [(piece.first_row, piece.rows) for piece in cut(table, 65)] == [(0, 60), (60, 40)]
    assert [(piece.first_row, piece.rows) for piece in cut(table, 1)] == [
        (0, 30),
        (30, 30),
        (60, 30),
        (90, 10),
    ]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    pq.write_table(SMALL_TABLE, tmp_path / "part[1].parquet")
    (found,) = find_files("t", str(tmp_path / "part[1].parquet"))
    assert found.path.endswith("part[1].parquet")
