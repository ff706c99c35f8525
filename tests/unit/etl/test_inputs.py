"""Every form a table may come in, and what is said about one that cannot be read."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from serin.errors import SourceUnreadable
from serin.etl.sources.files import find_files
from serin.etl.sources.partitions import Read
from serin.etl.sources.tables import Table, cut, open_table, read_piece

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
    monkeypatch.setattr("serin.etl.sources.json2parquet._BLOCK_BYTES", 1000)
    monkeypatch.setattr("serin.etl.sources.csv2parquet._BLOCK_BYTES", 1000)
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
    monkeypatch.setattr("serin.etl.sources.json2parquet._BLOCK_BYTES", 200)
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


@pytest.mark.parametrize("name", ["t.csv.gz", "t.jsonl.gz"])
def test_a_corrupt_or_cut_gzip_is_named_with_the_line_it_reaches(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        SourceUnreadable, match=rf"{name} cannot be read: the gzip is corrupt or cut off after about line"
    ):
        opened(path, tmp_path)
    path.write_bytes(whole)
    corrupt(path, len(whole) - 6)  # the checksum
    with pytest.raises(SourceUnreadable, match="the gzip is corrupt"):
        opened(path, tmp_path)


def test_a_cut_zst_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv.zst")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceUnreadable, match=r"t\.csv\.zst cannot be read: the zstd is corrupt or cut off"):
        opened(path, tmp_path)


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(
        SourceUnreadable, match=r"t\.parquet cannot be read: it is not a complete Parquet file"
    ):
        opened(tmp_path / "t.parquet", tmp_path)


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


def test_a_column_without_values_takes_its_type_from_other_files(tmp_path: Path) -> None:
    pq.write_table(TABLE.set_column(0, "city", pa.nulls(300)), tmp_path / "1.parquet")
    pq.write_table(TABLE, tmp_path / "2.parquet")
    table = opened(tmp_path / "*.parquet", tmp_path)
    assert str(table.types["city"]) == "string"
    assert values(table, "city")[0][299:301] == [None, "c0"]
