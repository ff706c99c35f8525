import gzip
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from serin.errors import SourceUnreadable
from serin.etl.build import build_dataset, current_key
from serin.etl.sources.files import find_files
from serin.etl.sources.partitions import Read
from serin.etl.sources.tables import cut, open_table, read_piece
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.logs import heard

TABLE = pa.table(
    {
        "city": ["a", "b", None, "c"] * 50,
        "size": [1, None, 3, 4] * 50,
        "price": [0.25, 1.5, None, -2.0] * 50,
        "sold": [row % 3 == 0 for row in range(200)],
    }
)


def spec_for(path: str) -> PipelineSpec:
    features = [
        {"columns": ["size", "price"], "steps": ["fill_median", "normalize"]},
        {"columns": ["city"], "steps": ["categorify"]},
    ]
    target = {"expression": "sold", "task": "binary"}
    return load_spec(
        {"name": "cities", "data": {"tables": {"main": path}, "target": target}, "features": features}
    )


def features_from(path: str, store: Store) -> tuple[bytes, bytes]:
    spec = spec_for(path)
    dataset = build_dataset(spec.data, spec.features, EtlSpec(), store=store)
    train = read_split(dataset.path, "train").whole()
    return train.num.tobytes(), train.cat.tobytes()


def test_every_form_of_a_table_gives_the_same_features(tmp_path: Path, store: Store) -> None:
    pq.write_table(TABLE, tmp_path / "one.parquet", row_group_size=70)
    expected = features_from(str(tmp_path / "one.parquet"), store)
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(TABLE.slice(0, 90), parts / "a.parquet")
    pq.write_table(TABLE.slice(90), parts / "b.parquet")
    (parts / "_SUCCESS").touch()
    pa_csv.write_csv(TABLE, tmp_path / "one.csv")
    (tmp_path / "two.csv.gz").write_bytes(gzip.compress((tmp_path / "one.csv").read_bytes()))
    with fsspec.open("memory://cities/one.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    for path in (str(parts), f"{parts}/*.parquet", "memory://cities/one.parquet"):
        assert features_from(path, store) == expected, path
    for path in ("one.csv", "two.csv.gz"):
        assert features_from(str(tmp_path / path), store) == expected, path


def test_a_dataset_is_computed_once_until_a_file_changes(tmp_path: Path, store: Store) -> None:
    file = tmp_path / "one.parquet"
    pq.write_table(TABLE, file)
    spec = spec_for(str(file))
    lines: list[str] = []
    first = build_dataset(spec.data, spec.features, EtlSpec(), store=store)
    with heard(lines.append):
        again = build_dataset(spec.data, spec.features, EtlSpec(engine="process", workers=1), store=store)
    assert again == first
    assert "there already" in lines[0]
    assert read_dataset(first.path).digest == first.digest
    key = current_key(spec.data, spec.features, store)
    pq.write_table(TABLE.slice(1), file)
    assert current_key(spec.data, spec.features, store) != key


def test_a_column_whose_later_values_are_wider_is_read_as_what_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serin.etl.sources.csv2parquet._BLOCK_BYTES", 1000
    )  # types are guessed from the first block
    lines = ["a,b,c,d"] + ["1,2,x,2024-01-01 00:00:00"] * 200 + ["1.5,word,y,2024-01-02 00:00:00"]
    (tmp_path / "wide.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = open_table("t", find_files("t", str(tmp_path / "wide.csv")), tmp_path)
    assert [str(kind) for kind in table.types.values()] == ["double", "string", "string", "timestamp[us]"]
    assert table.rows == 201


def test_files_of_one_table_must_agree_on_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1.5], "b": ["x"]}), tmp_path / "2.parquet")
    with pytest.raises(SourceUnreadable, match=r"2\.parquet.*column 'b' is string here and int64"):
        open_table("t", find_files("t", f"{tmp_path}/*.parquet"), tmp_path)


def test_integers_in_one_file_and_fractions_in_another_are_fractions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, None]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1.5]}), tmp_path / "2.parquet")
    table = open_table("t", find_files("t", f"{tmp_path}/*.parquet"), tmp_path)
    columns = [read_piece(piece, [Read(column="a", kind="float")]) for piece in cut(table, 10)]
    assert [column["a"].values.tolist()[:1] for column in columns] == [[1.0], [1.5]]


def test_pieces_cover_the_table_in_order_and_never_cut_a_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "1.parquet", row_group_size=30)
    table = open_table("t", find_files("t", str(tmp_path / "1.parquet")), tmp_path)
    assert [(piece.first_row, piece.rows) for piece in cut(table, 65)] == [(0, 60), (60, 40)]
    assert [(piece.first_row, piece.rows) for piece in cut(table, 1)] == [
        (0, 30),
        (30, 30),
        (60, 30),
        (90, 10),
    ]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n", encoding="utf-8")
    with pytest.raises(SourceUnreadable, match="two columns are called 'a'"):
        open_table("t", find_files("t", str(tmp_path / "twice.csv")), tmp_path)


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "part[1].parquet")
    (found,) = find_files("t", str(tmp_path / "part[1].parquet"))
    assert found.path.endswith("part[1].parquet")
