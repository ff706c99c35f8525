"""A table means the same in every form it may be written in: to the ETL, and to the graph that is served."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.feather as feather
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.columns.column import kind_of_type
from serin.etl.sources.files import find_files
from serin.etl.sources.tables import Read, cut, open_table, read_piece
from serin.export.convert.fuse import features2onnx
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, read_dataset
from serin.formats.rows import read_rows
from serin.formats.schema import Kind, Schema, outputs_of
from serin.formats.shards import read_split
from serin.formats.wire import Array, to_wire
from serin.spec.load import load_spec
from serin.store.store import Store
from tests.unit.etl.table_forms import NULL_WORDS, SUFFIXES, random_rows, vocabularies, write_forms
from tests.unit.etl.trips import build
from tests.unit.features.random_tables import examples

ROWS = 60
FEATURE_STEPS = [
    {"columns": ["word"], "steps": [{"categorify": {"buckets": 3, "min_count": 2}}]},
    {"columns": ["kind", "id", "open"], "steps": ["categorify"]},
    {"columns": ["place"], "steps": [{"hash_bucket": 97}]},
    {"columns": ["size"], "steps": [{"fill_median": {"indicator": True}}]},
    {"columns": ["known", "void"], "steps": ["categorify"]},
    {"columns": ["seen"], "steps": [{"date_parts": ["day"]}]},
]


def spec_over(folder: Path, suffix: str) -> Any:
    return load_spec(
        {
            "name": "forms",
            "data": {
                "tables": {"main": str(folder / f"main{suffix}"), "places": str(folder / f"places{suffix}")},
                "joins": [{"with": "places", "on": "place", "columns": ["kind"], "source": "lookup"}],
                "derived": {"known": "word in ('NA', 'null', 'plain')", "void": "is_null(word)"},
                "target": {"expression": "y == 1", "task": "binary"},
            },
            "features": FEATURE_STEPS,
        }
    )


def features_by_row(path: str) -> tuple[Array, Array]:
    parts = [read_split(path, split).whole() for split in ("train", "valid", "test")]
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    num, cat = (np.concatenate([getattr(part, name) for part in parts]) for name in ("num", "cat"))
    return num[order], cat[order]


class Served:
    """The dataset's feature graph in ONNX Runtime, asked with the rows of files as `serin predict` reads them."""

    def __init__(self, dataset: Path) -> None:
        described = read_dataset(dataset)
        plan = FeaturePlan.from_json(json.loads((dataset / FEATURES).read_text(encoding="utf-8")))
        self._graph = features2onnx(plan, described, dataset)
        model = self._graph.model.SerializeToString()
        self._session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self._schema = Schema(task="binary", inputs=described.inputs, outputs=outputs_of("binary"))

    def features(self, rows: Path) -> tuple[Array, Array]:
        pieces = [feather.read_table(rows)] if rows.suffix == ".arrow" else read_rows(rows, self._schema)
        table = pa.concat_tables(pieces)
        num, cat = self._session.run([self._graph.num, self._graph.cat], to_wire(table, self._schema))
        return num, cat


@settings(max_examples=min(examples(5), 400), deadline=None)
@given(vocabularies, st.integers(0, 2**32 - 1))
@example(NULL_WORDS, 1)
def test_a_table_gives_the_same_dataset_and_the_same_answers_in_every_form(
    vocabulary: list[str], seed: int
) -> None:
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch)
        patch.setattr("serin.etl.sources.convert._BLOCK_BYTES", int(random.choice([700, 16 * 2**20])))
        for name, values in zip(("main", "places"), random_rows(ROWS, vocabulary, random), strict=True):
            write_forms(folder, name, values, random)
        datasets = {}
        for suffix in SUFFIXES:
            store = Store(str(folder / f"store{suffix}"))
            datasets[suffix] = build(spec_over(folder, suffix), store)
        num, cat = features_by_row(datasets[".parquet"].path)
        served = Served(Path(datasets[".parquet"].path))
        for suffix, dataset in datasets.items():
            assert np.array_equal(features_by_row(dataset.path)[1], cat), suffix
            assert dataset.digest == datasets[".parquet"].digest, suffix
            served_num, served_cat = served.features(folder / f"main{suffix}")
            assert np.array_equal(served_cat, cat), suffix
            assert np.array_equal(served_num.view(np.int32), num.view(np.int32)), suffix


def columns_of(folder: Path, **kinds: Kind) -> dict[str, list[Any]]:
    """The columns of all CSV files in the folder, as the ETL reads them."""
    table = open_table("t", find_files("t", str(folder / "*.csv")), folder)
    found: dict[str, list[Any]] = {name: [] for name in kinds}
    for piece in cut(table, 1):
        columns = read_piece(piece, [Read(column=name, kind=kind) for name, kind in kinds.items()])
        for name, column in columns.items():
            found[name] += column.to_arrow().to_pylist()
    assert {name: kind_of_type(table.types[name]) for name in kinds} == kinds
    return found


@pytest.mark.parametrize(
    ("files", "kind", "values"),
    [
        (["NA\nNA\n", "EU\n\n"], "string", ["NA", "NA", "EU", None]),
        (["EU\n\n", "NA\nNA\n"], "string", ["EU", None, "NA", "NA"]),
        (["NA\nnull\n", "7\nNA\n"], "int", [None, None, 7, None]),
        (["NA\nnull\n", "true\nn/a\n"], "bool", [None, None, True, None]),
        (["NA\n\n", '"NA"\n""\n'], "string", ["NA", None, "NA", None]),
        (["\n\n", "NA\nEU\n"], "string", [None, None, "NA", "EU"]),
        (["NA\n1\n", "2.5\nnan\n"], "float", [None, 1, 2.5, None]),
    ],
)
def test_a_file_of_null_words_alone_takes_its_type_from_the_tables_other_files(
    tmp_path: Path, files: list[str], kind: Kind, values: list[Any]
) -> None:
    for number, cells in enumerate(files):
        lines = "".join(f"{cell},0\n" for cell in cells.splitlines())
        (tmp_path / f"{number}.csv").write_text(f"a,b\n{lines}")
    assert columns_of(tmp_path, a=kind) == {"a": values}


@pytest.mark.parametrize(
    ("head", "last", "kind", "first"),
    [
        ("NA", "EU", "string", "NA"),
        ("nan", "oops", "string", "nan"),
        ("null", "1.5", "float", None),
        ("NA", "NA", "string", "NA"),
        (" 7", "x", "string", " 7"),
        (" 7", " 2.5", "float", 7),
        ("12:30", "12:45", "string", "12:30"),
        ("12:30", "noon", "string", "12:30"),
        ("true", "NA", "bool", True),
        ("true", "tRUE", "string", "true"),
        ("2024-01-01", "NA", "timestamp", None),
        ("2024-01-01", "never", "string", "2024-01-01"),
        ("NA", "2024-01-01 10:00:00.123456789", "timestamp", None),
        ('"a\nb"', "NA", "string", "a\nb"),
    ],
)
def test_the_type_of_a_column_holds_all_rows_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, last: str, kind: Kind, first: Any
) -> None:
    monkeypatch.setattr("serin.etl.sources.convert._BLOCK_BYTES", 100)
    lines = [f"{head},1"] * 60 + [f"{last},1"]
    (tmp_path / "t.csv").write_text("a,b\n" + "\n".join(lines) + "\n")
    found = columns_of(tmp_path, a=kind)["a"]
    assert len(found) == 61
    if kind != "timestamp":
        assert found[0] == first
    assert (found[-1] is None) == (last == "NA" and kind != "string")
